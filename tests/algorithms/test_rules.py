"""Every built-in rule on synthetic logits, equality included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms import uncertainty
from algorithms.base import PromptView, RouteContext
from algorithms.registry import AlgorithmError, load, numeric_params, validate_params
from models.rng import Purpose, uniform
from tests.algorithms import reference
from tests.algorithms.reference import log_u
from tests.algorithms.steps import HIDDEN, quick, route, side, step, uniform_over

V = 8
RANDOM = torch.randn(64, V, generator=torch.Generator().manual_seed(3)) * 3
ROWS = [uniform_over(count, V) for count in (1, 2, 4, 8)]
BITS = float(np.float32(math.log(2)))


def context(models: int, index: int) -> RouteContext:
    return RouteContext(tuple(f"m{n}" for n in range(models)), index, V, HIDDEN, torch.device("cpu"))


@pytest.mark.parametrize("models", [2, 3, 5])
def test_destinations_number_the_other_models_in_route_order_from_one(models):
    for index in range(models):
        others = [model for model in range(models) if model != index]
        assert context(models, index).destination(index) == 0
        assert [context(models, index).destination(model) for model in others] == list(range(1, models))


def test_measures_of_known_distributions():
    logits = torch.tensor(ROWS)
    nats = torch.tensor([0.0, math.log(2), math.log(4), math.log(8)])
    assert torch.equal(uncertainty.entropy(logits), nats)
    assert torch.allclose(uncertainty.normalized_entropy(logits), nats / math.log(V))
    assert torch.allclose(uncertainty.confidence(logits), torch.tensor([1.0, 0.5, 0.25, 0.125]))
    assert torch.allclose(uncertainty.margin(logits), torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_entropy_agrees_with_the_definition_in_double_precision():
    wide = torch.randn(16, 5000, generator=torch.Generator().manual_seed(5)) * 4 + 900
    logp = wide.double().log_softmax(dim=-1)
    expected = -(logp.exp() * logp).sum(dim=-1)
    assert torch.allclose(uncertainty.entropy(wide).double(), expected, rtol=1e-4, atol=1e-5)


@quick
@given(st.lists(st.floats(-200, 200, width=32), min_size=2, max_size=40))
def test_measures_stay_in_their_ranges(values):
    row = torch.tensor([values])
    assert 0 <= float(uncertainty.entropy(row)) <= math.log(len(values)) + 1e-4
    assert 0 <= float(uncertainty.normalized_entropy(row)) <= 1
    assert 0 < float(uncertainty.confidence(row)) <= 1 + 1e-5
    assert -1e-6 <= float(uncertainty.margin(row)) <= 1 + 1e-5


def test_measures_leave_the_logits_alone():
    logits = RANDOM.clone()
    for measure in (uncertainty.entropy, uncertainty.normalized_entropy, uncertainty.confidence, uncertainty.margin):
        measure(logits)
    assert torch.equal(logits, RANDOM)


def test_log_u_agrees_with_the_definition_in_double_precision():
    wide = torch.randn(16, 500, generator=torch.Generator().manual_seed(5)) * 6 + 4
    expected = [log_u(row) for row in wide.tolist()]
    got = torch.stack((uncertainty.aleatoric(wide), uncertainty.epistemic(wide)), dim=1)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    # Ten equal logits of 20: psi(201) - psi(21) = 1/21 + ... + 1/200.
    even = torch.full((1, 12), 20.0)
    assert float(uncertainty.aleatoric(even)) == pytest.approx(sum(1 / n for n in range(21, 201)), rel=1e-5)
    assert float(uncertainty.epistemic(even)) == pytest.approx(10 / 210)


def test_log_u_without_evidence():
    rows = torch.tensor([[-1.0] * V, [-math.inf] * V, [5.0, *[-math.inf] * (V - 1)]])
    assert uncertainty.aleatoric(rows).tolist() == [0, 0, 0]
    assert uncertainty.epistemic(rows).tolist() == [1, 1, pytest.approx(V / (V + 5))]


@pytest.mark.parametrize("models", [1, 2, 4])
def test_none_stays_everywhere(models):
    assert [route("none", {}, index, RANDOM, models=models) for index in range(models)] == [[0] * 64] * models


def test_entropy_hands_over_at_the_threshold_and_above():
    assert route("entropy", {"threshold": BITS}, 0, ROWS) == [0, 1, 1, 1]
    above = float(np.nextafter(np.float32(BITS), np.float32(9)))
    assert route("entropy", {"threshold": above}, 0, ROWS) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("measure", "threshold", "expected"),
    [
        ("entropy", 0, [1, 1, 1, 1]),
        ("entropy", 3, [0, 0, 0, 0]),
        ("normalized_entropy", 1, [0, 0, 0, 1]),
        ("normalized_entropy", 1.001, [0, 0, 0, 0]),
        ("confidence", 0.5, [0, 1, 1, 1]),
        ("confidence", 0.49, [0, 0, 1, 1]),
        ("confidence", 1, [1, 1, 1, 1]),
        ("margin", 0, [0, 1, 1, 1]),
        ("margin", 1, [1, 1, 1, 1]),
    ],
)
def test_entropy_measures(measure, threshold, expected):
    assert route("entropy", {"threshold": threshold, "measure": measure}, 0, ROWS) == expected


def test_entropy_peer_returns_after_one_or_once_it_is_sure():
    assert route("entropy", {"threshold": 1}, 1, ROWS) == [1, 1, 1, 1]
    assert route("entropy", {"threshold": 1, "back": "confident"}, 1, ROWS) == [1, 1, 0, 0]


def test_log_u_hands_over_where_all_thresholds_are_reached():
    aleatoric, epistemic = uncertainty.aleatoric(RANDOM), uncertainty.epistemic(RANDOM)
    au, eu = float(aleatoric.median()), float(epistemic.median())
    assert route("entropy", {"threshold": au, "measure": "aleatoric"}, 0, RANDOM) == (aleatoric >= au).long().tolist()
    assert route("entropy", {"threshold": eu, "measure": "epistemic"}, 0, RANDOM) == (epistemic >= eu).long().tolist()
    both = route("entropy", {"threshold": au, "measure": "aleatoric", "epistemic": eu}, 0, RANDOM)
    assert both == ((aleatoric >= au) & (epistemic >= eu)).long().tolist()
    assert 0 < sum(both) < 32


def test_a_threshold_of_the_way_back():
    params = {"threshold": 1, "back": "confident", "threshold_back": BITS}
    assert route("entropy", params, 0, ROWS) == [0, 0, 1, 1]
    assert route("entropy", params, 1, ROWS) == [1, 0, 0, 0]
    assert route("entropy", params | {"threshold_back": 0}, 1, ROWS) == [0] * 4
    sure = {"threshold": 0.3, "measure": "confidence", "back": "confident", "threshold_back": 0.9}
    assert route("entropy", sure, 1, ROWS) == [1, 0, 0, 0]


def test_thresholds_are_per_row():
    small = side("entropy", {"threshold": 9}, 0)
    assert small.route(step(ROWS, {"threshold": [0.1, 0.1, 9, 9]})).tolist() == [0, 1, 0, 0]


def test_rstitch_gives_equality_to_the_small_model_on_both_sides():
    third = float(np.float32(math.log(2)) / np.float32(math.log(8)))
    assert route("rstitch", {"tau": third}, 0, ROWS) == [0, 0, 1, 1]
    assert route("rstitch", {"tau": third}, 1, ROWS) == [1, 1, 0, 0]


@pytest.mark.parametrize(("tau", "small", "large"), [(1, 0, 1), (-0.5, 1, 0), (-1, 1, 0)])
def test_rstitch_at_the_ends_of_the_range(tau, small, large):
    rows = [*ROWS, *RANDOM.tolist()]
    assert route("rstitch", {"tau": tau}, 0, rows) == [small] * len(rows)
    assert route("rstitch", {"tau": tau}, 1, rows) == [large] * len(rows)


def test_rstitch_vocab_replaces_the_width_of_the_logits():
    assert route("rstitch", {"tau": 0.4}, 0, [uniform_over(2, 4)]) == [1]
    assert route("rstitch", {"tau": 0.4, "vocab": 16}, 0, [uniform_over(2, 4)]) == [0]


def test_families():
    for name, params, small, large in [
        ("entropy", {"threshold": 1}, False, True),
        ("rstitch", {"tau": 0.5}, False, True),
        ("bernoulli", {"p": 0.5}, False, True),
        ("every_n", {"shape": "visit", "n": 2}, False, True),
        ("every_n", {"shape": "block", "n": 2}, True, True),
        ("me", {"weights": [1, 1]}, True, True),
        ("query", {"source": "field", "threshold": 1}, False, True),
    ]:
        assert [side(name, params, index).keep_sample for index in (0, 1)] == [small, large], name


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("models", [2, 3, 5])
def test_every_n_block_names_the_writer_of_the_next_token(n, models):
    indices = list(range(4 * n * models))
    for own in range(models):
        destinations = route("every_n", {"shape": "block", "n": n}, own, torch.zeros(len(indices), V), indices, models)
        writers = [((t + 1) // n) % models for t in indices]
        assert destinations == [context(models, own).destination(writer) for writer in writers]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_n_visit_sends_the_last_of_every_n(n):
    zeros = torch.zeros(20, V)
    expected = [int((t + 1) % n == 0) for t in range(20)]
    assert route("every_n", {"shape": "visit", "n": n}, 0, zeros) == expected
    assert route("every_n", {"shape": "visit", "n": n}, 1, zeros) == [1] * 20


def test_every_n_by_seed_spreads_the_switches_of_requests():
    params = {"shape": "visit", "n": 4, "phases": "seed"}
    entry = side("every_n", params, 0)
    seeds = [5, 6, 7, 8, -1, 2**63 - 1]
    for seed in seeds:
        rows = step(torch.zeros(20, V), {"n": 4.0}, range(20), [seed] * 20)
        assert entry.route(rows).tolist() == [int((t + 1 + seed % 2**31) % 4 == 0) for t in range(20)]
    at_once = step(torch.zeros(400, V), {"n": 4.0}, [7] * 400, list(range(400)))
    assert int(entry.route(at_once).sum()) == 100


def test_bernoulli_draws_by_position_alone():
    p = float(np.float32(0.3))
    seeds, choices, at = [5, 5, -9, 5] * 50, [0, 1, 0, 2] * 50, [n // 4 for n in range(200)]
    built = side("bernoulli", {"p": 0.3}, 0)
    got = built.route(step(torch.zeros(200, V), {"p": 0.3}, at, seeds, choices)).tolist()
    keys = zip(seeds, choices, at, strict=True)
    assert got == [int(uniform(seed, choice, t, Purpose.ROUTE) < p) for seed, choice, t in keys]
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = step(torch.zeros(200, V), {"p": 0.3}, *([column[n] for n in order] for column in (at, seeds, choices)))
    assert built.route(shuffled).tolist() == [got[n] for n in order]


def test_bernoulli_shares():
    zeros, at = torch.zeros(4000, 2), list(range(4000))
    assert sum(route("bernoulli", {"p": 0}, 0, zeros, at)) == 0
    assert sum(route("bernoulli", {"p": 1}, 0, zeros, at)) == 4000
    # Five standard deviations of a fixed draw.
    assert abs(sum(route("bernoulli", {"p": 0.25}, 0, zeros, at)) - 1000) < 137
    assert route("bernoulli", {"p": 0.25}, 1, zeros, at) == [1] * 4000


WEIGHTS = st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=6).filter(lambda weights: sum(weights) > 0)


@quick
@given(
    weights=WEIGHTS,
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    mode=st.sampled_from(["draw", "proportions"]),
)
def test_me_names_the_same_writers_on_every_side_and_before_the_first_token(weights, seed, choice, mode):
    models, at = len(weights), list(range(-1, 30))
    params = numeric_params(side("me", {"weights": weights}, 0, models).params)
    if mode == "draw":
        expected = [reference.drawn(seed, choice, t + 1, weights) for t in at]
    else:
        expected = [reference.proportioned(t + 1, weights) for t in at]
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    rows = step(torch.zeros(len(at), V), params, at, [signed] * len(at), [choice] * len(at))
    for own in range(models):
        built = side("me", {"weights": weights, "mode": mode}, own, models)
        assert built.route(rows).tolist() == [context(models, own).destination(writer) for writer in expected]
    prompt = PromptView([1, 2], seed, choice, params, None)
    assert side("me", {"weights": weights, "mode": mode}, 0, models).start(prompt) == expected[0]


@quick
@given(weights=WEIGHTS)
def test_me_proportions_keep_close_to_the_shares(weights):
    total, counts = sum(weights), [0] * len(weights)
    for t in range(200):
        counts[reference.proportioned(t, weights)] += 1
        gaps = [abs(count - (t + 1) * weight / total) for count, weight in zip(counts, weights, strict=True)]
        assert max(gaps) <= (len(weights) - 1) / 2 + 1e-6


@pytest.mark.parametrize(
    ("weights", "models", "message"),
    [
        ([0.5, 0.5], 3, "weights: 2 given for 3 models"),
        ([0.0, 0.0], 2, "weights: at least one must be above 0"),
        ([1e-60, 1e-60], 2, "weights: at least one must be above 0"),
        ([1e-320, 0.0], 2, "weights: at least one must be above 0, and not by less than float32 can tell"),
        ([math.nan, 1.0], 2, "'weights': expected `float` >= 0"),
        ([-0.1, 1.0], 2, "'weights': expected `float` >= 0"),
    ],
)
def test_me_weights_that_do_not_fit(weights, models, message):
    with pytest.raises(AlgorithmError, match=message):
        validate_params(load("me"), {"weights": weights}, ["m"] * models)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"source": "mf"}, "checkpoint: needed by source 'mf'"),
        ({"source": "length", "checkpoint": "x"}, "checkpoint: source 'length' reads none"),
        ({"source": "text"}, "expected one of .*mf.*, not 'text'"),
    ],
)
def test_query_parameters_that_do_not_fit(params, message):
    with pytest.raises(AlgorithmError, match=message):
        validate_params(load("query"), {"threshold": 0.5} | params, "ab")


def test_query_never_hands_back_and_hands_over_before_the_first_token_only():
    for source, score in (("field", 0.5), ("length", None)):
        threshold = 0.5 if source == "field" else 3
        weak, strong = (side("query", {"source": source, "threshold": threshold}, index) for index in (0, 1))
        params = {"threshold": threshold, "strong": 0.0, "weak": 0.0}
        assert weak.start(PromptView([1, 2, 3], 0, 0, params, score)) == 1
        assert weak.start(PromptView([1, 2], 0, 0, params, score and 0.4)) == 0
        assert weak.route(step(RANDOM, params)).tolist() == strong.route(step(RANDOM, params)).tolist() == [0] * 64
        assert not weak.warms_peers


def test_every_rule_can_be_captured_in_a_graph():
    for name, params in [
        ("none", {}),
        ("entropy", {"threshold": 1}),
        ("rstitch", {"tau": 0.1}),
        ("bernoulli", {"p": 1}),
        ("me", {"weights": [1, 1]}),
        ("query", {"source": "field", "threshold": 1}),
    ]:
        assert side(name, params, 0).pure
