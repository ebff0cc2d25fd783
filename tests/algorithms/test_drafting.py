"""Drafts: what judges say, which drafts are taken, and the law of what comes out, by enumeration of the noise."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.base import Algorithm, Definition, ReturnAfterOne
from algorithms.cascade import CascadeLarge
from algorithms.drafting import Drafter, DraftRows, Drafts, Verdict, Verifier
from algorithms.registry import AlgorithmError, load, numeric_params
from models import rng
from models.sampler import SamplingRows, processed, sample
from tests.algorithms.steps import quick, side, step

torch.set_num_threads(1)

GRID = 48
"""Values of each id's uniform number: their midpoints stand for the whole interval."""


def judged(algorithm: str, params: dict[str, Any], scores: list[float], *, index: int = 0, left: int = 9) -> Verdict:
    built = side(algorithm, params, 0)
    assert isinstance(built, Drafter)
    ids = [1] * (5 + index + len(scores))
    return built.judge(Drafts(scores, ids, index, left, left == 0, numeric_params(built.params)))


def test_rounds_end_at_gamma_or_where_the_verifier_writes_the_last_token():
    assert [judged("speculative", {"gamma": 3}, [0.0] * n) for n in (1, 2, 3)] == [
        Verdict.DRAFT,
        Verdict.DRAFT,
        Verdict.VERIFY,
    ]
    assert [judged("speculative", {"gamma": 3}, [0.0], left=n) for n in (2, 1, 0)] == [
        Verdict.DRAFT,
        Verdict.VERIFY,
        Verdict.VERIFY,
    ]


@pytest.mark.parametrize(
    ("params", "verdict"),
    [
        ({"threshold": -2.0}, Verdict.ACCEPT),
        ({"threshold": -1.99}, Verdict.DROP),
        ({"threshold": -4.0, "measure": "quantile", "quantile": 0.0}, Verdict.ACCEPT),
        ({"threshold": -3.99, "measure": "quantile", "quantile": 0.0}, Verdict.DROP),
        ({"threshold": -2.0, "measure": "quantile", "quantile": 0.5}, Verdict.ACCEPT),
        ({"threshold": -0.4, "measure": "quantile", "quantile": 1.0}, Verdict.DROP),
        ({"threshold": -0.5, "measure": "quantile", "quantile": 1.0}, Verdict.ACCEPT),
    ],
)
def test_cascades_judge_by_mean_or_quantile_equality_included(params, verdict):
    scores = [-0.5, -4.0, -2.0, -1.5]
    assert judged("cascade", {"mode": "sequence"} | params, scores, left=3) is Verdict.DRAFT
    assert judged("cascade", {"mode": "sequence"} | params, scores, left=0) is verdict
    chunks = [judged("cascade", {"mode": "chunk", "chunk": 4} | params, scores, index=n) for n in (0, 1, 2, 3, 4)]
    assert chunks == [verdict, *[Verdict.DRAFT] * 3, verdict]


def test_scores_are_those_of_raw_logits():
    logits = torch.tensor([[0.0, math.log(3), -math.inf], [5.0, 5.0, 5.0]])
    made = step(logits, {})
    made.tokens = torch.tensor([0, 2])
    for mode, values in (("sequence", [math.log(1 / 4), math.log(1 / 3)]), ("speculative", [3 / 4, 1 / 3])):
        built = side("cascade", {"mode": mode}, 0, vocab=3)
        assert isinstance(built, Drafter)
        assert built.score(made).tolist() == pytest.approx(values)


@pytest.mark.parametrize(
    ("mode", "back"), [("speculative", [1, 1, 1, 1]), ("sequence", [0, 0, 0, 0]), ("chunk", [0, 1, 0, 1])]
)
def test_when_the_large_side_of_a_cascade_goes_back(mode, back):
    built = side("cascade", {"mode": mode, "chunk": 2}, 1)
    assert built.route(step(torch.zeros(4, 8), numeric_params(built.params))).tolist() == back


def large(rule: str) -> CascadeLarge:
    built = side("cascade", {"mode": "speculative", "rule": rule}, 1)
    assert isinstance(built, CascadeLarge)
    return built


def rows(p: torch.Tensor, own: torch.Tensor, drafts: torch.Tensor, q_max: float, alpha: float) -> DraftRows:
    count = len(own)
    return DraftRows(
        logits=p.expand(count, -1),
        tokens=own,
        drafts=drafts,
        scores=torch.full((count,), q_max),
        index=torch.zeros(count, dtype=torch.int64),
        params={"alpha": torch.full((count,), alpha)},
    )


@quick
@given(
    q=st.lists(st.floats(-4, 4), min_size=3, max_size=3),
    p=st.lists(st.floats(-4, 4), min_size=3, max_size=3),
    alpha=st.floats(-1, 1),
    rule=st.sampled_from(["chow", "diff"]),
)
def test_deferral_rules(q, p, alpha, rule):
    """r = 1 where max q < 1 - alpha (chow) or max q < max p - alpha (diff); then only equal tokens are taken."""
    q_max = float(torch.tensor(q).softmax(-1).max())
    p_max = float(torch.tensor(p).softmax(-1).max())
    least = (1 if rule == "chow" else p_max) - float(np.float32(alpha))
    if abs(q_max - least) < 1e-5:
        return
    taken = large(rule).accept(rows(torch.tensor(p), torch.tensor([0, 1]), torch.tensor([0, 0]), q_max, alpha))
    assert taken.tolist() == [True, q_max >= least]


@pytest.fixture
def every_noise(monkeypatch):
    """All combinations of GRID values for three ids, in place of hashed bits: [GRID ** 3] rows."""
    middles = (np.arange(GRID) + 0.5) / GRID
    units = np.array(list(itertools.product(middles, repeat=3)))
    bits = torch.from_numpy((units * 2**53).astype(np.uint64) << np.uint64(11)).view(torch.int64)
    monkeypatch.setattr(rng, "item_bits_tensor", lambda keys, items: bits)
    return len(bits)


def sampling(count: int, **settings: float) -> SamplingRows:
    made = SamplingRows.greedy(count)
    for name, value in ({"temperature": 1.0} | settings).items():
        setattr(made, name, np.full(count, value, getattr(made, name).dtype))
    return made


Q = torch.tensor([[1.0, 0.2, -0.5]])
P = torch.tensor([[0.1, 1.3, -1.5]])
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.75},
    {"min_p": 0.3, "temperature": 2.0},
]


@pytest.mark.parametrize("settings", FILTERS)
def test_the_law_of_a_round_is_the_large_models(every_noise, settings):
    """Both models draw with one noise: what comes out has the large model's law, whatever the small one drafts, and the drafts
    that are taken are as many as the formula for exponential races says."""
    count = every_noise
    drafts = sample(Q.expand(count, -1), sampling(count, **settings))
    own = sample(P.expand(count, -1), sampling(count, **settings))
    taken = Verifier.accept(side("speculative", {}, 1), rows(P, own, drafts, 0.0, 0.0))
    written = torch.where(taken, drafts, own)
    q, p = (processed(x, sampling(1, **settings)).double().softmax(-1)[0] for x in (Q, P))
    shares = torch.bincount(written, minlength=3).double() / count
    assert shares.tolist() == pytest.approx(p.tolist(), abs=1.5 / GRID)
    both = [v for v in range(3) if q[v] > 0 and p[v] > 0]
    expected = sum(1 / sum(float(max(q[w] / q[v], p[w] / p[v])) for w in range(3)) for v in both)
    assert float(taken.double().mean()) == pytest.approx(expected, abs=1.5 / GRID)


@pytest.mark.parametrize("settings", FILTERS)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("rule", ["chow", "diff"])
def test_the_law_of_a_speculative_cascade(every_noise, rule, deferred, settings):
    """(1 - r) q + r p."""
    count = every_noise
    drafts = sample(Q.expand(count, -1), sampling(count, **settings))
    own = sample(P.expand(count, -1), sampling(count, **settings))
    alpha = -1.0 if deferred else 1.0
    taken = large(rule).accept(rows(P, own, drafts, float(Q.softmax(-1).max()), alpha))
    written = torch.where(taken, drafts, own)
    law = processed(P if deferred else Q, sampling(1, **settings)).double().softmax(-1)[0]
    shares = torch.bincount(written, minlength=3).double() / count
    assert shares.tolist() == pytest.approx(law.tolist(), abs=1.5 / GRID)


class Judge(Drafter):
    def judge(self, drafts: Drafts) -> Verdict:
        return Verdict.ACCEPT


class NoJudge(Drafter):
    pass


def by_side(*classes: type[Algorithm]) -> Any:
    return lambda side: classes[min(side, len(classes) - 1)]


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (Definition("odd", by_side(NoJudge, Verifier)), r"NoJudge defines no judge\(\)"),
        (Definition("odd", by_side(Judge, ReturnAfterOne)), "side 1 must be a Verifier"),
        (Definition("odd", by_side(Verifier, Judge)), "only side 0 of exactly two models can be a Drafter"),
        (Definition("odd", by_side(Judge, Verifier), max_models=3), "exactly two models"),
        (Definition("odd", by_side(Judge), min_models=1), "exactly two models"),
    ],
)
def test_definitions_that_cannot_work(definition, message, monkeypatch):
    module = type("module", (), {"ALGORITHM": definition})
    monkeypatch.setattr("algorithms.registry._builtin_names", lambda: ("odd",))
    monkeypatch.setattr("algorithms.registry.importlib.import_module", lambda name: module)
    with pytest.raises(AlgorithmError, match=message):
        load("odd")


def test_sides_with_drafts_are_decided_by_the_host():
    for name, params in (("speculative", {}), ("cascade", {"mode": "chunk"})):
        assert not any(side(name, params, index).pure for index in (0, 1))
