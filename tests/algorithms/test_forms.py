"""A rule written as `decide` gives the same destinations as the tensor form."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from algorithms.base import Algorithm, Definition, TokenView
from algorithms.bernoulli import BernoulliParams
from algorithms.entropy import EntropyParams
from algorithms.every_n import EveryNParams
from algorithms.registry import numeric_params
from algorithms.rstitch import RStitchParams
from models.rng import Purpose, uniform
from tests.algorithms.steps import quick, side, step

logits_rows = st.integers(2, 12).flatmap(
    lambda width: st.lists(
        st.lists(st.floats(-30, 30, width=32), min_size=width, max_size=width), min_size=1, max_size=6
    )
)
keys = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 7), st.integers(0, 5000))


def both(name, params, decided, rows, index=0, models=2, positions=None):
    """Destinations of the built-in and of the same rule as `decide`."""
    vocab = len(rows[0])
    built = side(name, params, index, models, vocab)
    hand_made = side(Definition(name, lambda _: decided, type(built.params), 2, models), params, index, models, vocab)
    assert built.pure
    assert not hand_made.pure
    seeds, choices, at = zip(*(positions or [(3, 0, n) for n in range(len(rows))]), strict=True)
    given_step = step(rows, numeric_params(built.params), at, seeds, choices)
    return built.route(given_step).tolist(), hand_made.route(given_step).tolist()


def far_from(values, threshold):
    """Whether rounding alone cannot put any of the values on the other side of the threshold."""
    return all(abs(value - threshold) > 1e-4 for value in values)


class DecideEntropy(Algorithm):
    def decide(self, token: TokenView) -> int:
        return int(token.entropy >= token.params["threshold"])


class DecideConfidence(Algorithm):
    def decide(self, token: TokenView) -> int:
        return int(token.confidence <= token.params["threshold"])


class DecideLarge(Algorithm):
    keep_sample = True

    def decide(self, token: TokenView) -> int:
        return int(token.entropy / math.log(len(token.logits)) <= token.params["tau"])


class DecideBlock(Algorithm):
    keep_sample = True

    def decide(self, token: TokenView) -> int:
        turn = (token.index + 1) // int(token.params["n"]) % len(self.context.models)
        return self.context.destination(turn)


class DecideBernoulli(Algorithm):
    def decide(self, token: TokenView) -> int:
        return int(uniform(token.seed, token.choice, token.index, Purpose.ROUTE) < token.params["p"])


@quick
@given(logits_rows, st.floats(0, 3))
def test_entropy(rows, threshold):
    logp = torch.tensor(rows).double().log_softmax(dim=-1)
    assume(far_from((-(logp.exp() * logp).sum(dim=-1)).tolist(), threshold))
    tensor, plain = both("entropy", {"threshold": threshold}, DecideEntropy, rows)
    assert tensor == plain
    assert EntropyParams(threshold=threshold).measure == "entropy"


@quick
@given(logits_rows, st.floats(0, 1))
def test_confidence(rows, threshold):
    assume(far_from(torch.tensor(rows).double().softmax(dim=-1).amax(dim=-1).tolist(), threshold))
    tensor, plain = both("entropy", {"threshold": threshold, "measure": "confidence"}, DecideConfidence, rows)
    assert tensor == plain


@quick
@given(logits_rows, st.floats(-1, 1))
def test_rstitch_large(rows, tau):
    logp = torch.tensor(rows).double().log_softmax(dim=-1)
    assume(far_from((-(logp.exp() * logp).sum(dim=-1) / math.log(len(rows[0]))).tolist(), tau))
    tensor, plain = both("rstitch", {"tau": tau}, DecideLarge, rows, index=1)
    assert tensor == plain
    assert RStitchParams(tau=tau).vocab == 0


@quick
@given(st.data(), st.integers(1, 40), st.integers(2, 6), st.lists(keys, min_size=1, max_size=8))
def test_every_n_block(data, n, models, positions):
    index = data.draw(st.integers(0, models - 1))
    rows = [[0.0, 1.0]] * len(positions)
    params = {"shape": "block", "n": n}
    tensor, plain = both("every_n", params, DecideBlock, rows, index, models, positions)
    assert tensor == plain
    assert EveryNParams(**params).n == n


@quick
@given(st.floats(0, 1, width=32), st.lists(keys, min_size=1, max_size=8))
def test_bernoulli(p, positions):
    tensor, plain = both("bernoulli", {"p": p}, DecideBernoulli, [[0.0, 1.0]] * len(positions), positions=positions)
    assert tensor == plain
    assert BernoulliParams(p=p).p == p


def test_scratch_state_stays_with_its_row():
    class Counting(Algorithm):
        def decide(self, token: TokenView) -> int:
            token.state["seen"] = token.state.get("seen", 0) + 1
            return int(token.state["seen"] >= token.params["after"])

    definition = Definition("counting", lambda _: Counting)
    built = side(definition, {}, 0)
    given_step = step([[0.0, 1.0]] * 2, {"after": [1, 2]})
    assert built.route(given_step).tolist() == [1, 0]
    assert built.route(given_step).tolist() == [1, 1]
    assert given_step.state == [{"seen": 2}, {"seen": 2}]
