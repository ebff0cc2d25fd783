"""Descriptions of deployments, bounds, lists and surveys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batching.loads import load, paper_pair
from tests.batching.test_simulator import networks
from trouterd.batching import survey as survey_module
from trouterd.batching.bound import ideal
from trouterd.batching.chain import solve
from trouterd.batching.launch import feasible
from trouterd.batching.network import Network, NetworkError, StepTime, keep_commit, rewrite_commit
from trouterd.batching.plan import plan
from trouterd.batching.policies import Delayed, constant
from trouterd.batching.predictor import Predictor
from trouterd.batching.search import all_feasible, search
from trouterd.batching.simulator import simulate
from trouterd.batching.survey import Judged, survey
from trouterd.batching.workload import MarkovWorkload


@settings(max_examples=25, deadline=None)
@given(networks(), st.integers(1, 40), st.none() | st.integers(1, 12))
def test_lists_are_feasible_and_better_than_eager(network: Network, concurrency: int, most: int | None) -> None:
    found = plan(network, concurrency, most)
    assert found.concurrency == concurrency
    assert found.thresholds(1) == (1,) * network.size
    for active in range(1, concurrency + 1):
        thresholds = found.thresholds(active)
        assert feasible(thresholds, active)
        assert most is None or max(thresholds) <= most
        assert found.predicted[active - 1] >= 0.99 * found.eager[active - 1] > 0
    assert found.thresholds(concurrency + 5) == found.thresholds(concurrency)


def test_published_choice_at_every_number_of_requests() -> None:
    """arXiv 2610.12242, appendix D: 2 of 2, 2 of 3, 3 of 4."""
    found = plan(paper_pair(), 4)
    assert found.lists == ((1, 1, 1, 1), (1, 2, 2, 3))
    assert found.predicted == pytest.approx([63.4, 110.3, 158.1, 207.9], rel=0.01)
    assert [survey(paper_pair(), active).best.thresholds[1] for active in (2, 3, 4)] == [2, 2, 3]


def test_models_on_one_gpu_take_turns() -> None:
    """Whatever is interpolated or scaled: one threshold less in all, and both models would run at a time."""
    found = plan(load("R2R 10%", "H", 1.0), 200)
    for active in range(2, 201):
        assert sum(found.thresholds(active)) == active + 1


@pytest.mark.parametrize("concurrency", [6, 23, 90])
def test_lists_hold_what_they_predict(concurrency: int) -> None:
    """At numbers of requests between those that were searched, in the simulator."""
    network = load("Co-LLM 20%", "A", 1.0)
    found = plan(network, 128)
    outcome = simulate(network, Delayed(found.lists), MarkovWorkload(network.routing, concurrency, 2), 25_000)
    assert outcome.tokens_per_second == pytest.approx(found.predicted[concurrency - 1], rel=0.05)
    eager = simulate(network, constant((1, 1)), MarkovWorkload(network.routing, concurrency, 2), 10_000)
    assert outcome.tokens_per_second > 1.5 * eager.tokens_per_second


def test_search_against_all() -> None:
    for network in (load("R2R 10%", "H"), load("Co-LLM 20%", "A", 1.0), load("R-Stitch", "H", 1.0)):
        predictor = Predictor(network, 12)
        rates = {found: predictor.steps_per_second(12, found) for found in all_feasible(2, 12)}
        assert rates[search(predictor, 12).thresholds] >= 0.985 * max(rates.values())


def test_bound_of_one_request_is_met() -> None:
    for network in (paper_pair(), load("ME", "A")):
        assert solve(network, 1, (1,) * network.size).steps_per_second == pytest.approx(ideal(network, 1), rel=2e-3)


def test_bound_with_hand_offs_that_take_time() -> None:
    pair = Network.pair((StepTime.affine(6), StepTime.affine(28)), 0.35, handoff=1)
    assert solve(pair, 1, (1, 1)).steps_per_second == pytest.approx(ideal(pair, 1), rel=2e-3)
    # Where no request ever waits, each is on its way for 1 between two steps of which one hands over.
    assert 8 / ideal(pair, 8) == pytest.approx(
        8 / ideal(Network.pair(pair.step_times, 0.35), 8) + pair.handoffs_per_step(pair.shares)
    )


def test_bounds() -> None:
    fast, slow = StepTime.affine(1), StepTime.affine(8)
    # The large model alone, in full batches: two steps of 4 requests, one of which is its own.
    busy = Network.pair((fast, slow), 1.0)
    assert ideal(busy, 4) == pytest.approx(4 / 4.5)
    assert ideal(busy, 2000) == pytest.approx(2000 / 4.5)
    # On one GPU, in time slices: a round of both takes 9 however large the batches.
    assert ideal(Network.pair((fast, slow), 1.0, contention=(1, 1)), 4) == pytest.approx(8 / 9)
    # Nearly no contention: nearly the bound of separate GPUs, and never above.
    for share in (0.1, 0.5, 0.9):
        bounds = [ideal(Network.pair((fast, slow), share, contention=(c, c)), 8) for c in (0.0, 0.01, 0.5, 1.0, 3.0)]
        assert bounds == sorted(bounds, reverse=True)
    assert ideal(busy, 4, shares=(1.0, 0.0)) == pytest.approx(4)


def test_survey_judges_three_models_by_the_simulator() -> None:
    network = load("ME", "A", 1.0)
    found = survey(network, 8, max_batch=4)
    assert {judged.method for judged in found.judged} == {"simulated"}
    assert found.best.tokens_per_second > 1.4 * found.eager.tokens_per_second
    assert all(feasible(judged.thresholds, 8) for judged in found.judged)
    assert min(found.best.thresholds[1:]) > 1


def test_survey_names_its_methods() -> None:
    assert {judged.method for judged in survey(paper_pair(), 4).judged} == {"exact"}
    assert {judged.method for judged in survey(paper_pair(), 7).judged} == {"reduced"}
    assert len(survey(paper_pair(), 4).judged) == 10
    assert survey(paper_pair(), 1).best.thresholds == (1, 1)
    assert max(max(judged.thresholds) for judged in survey(paper_pair(), 5, max_batch=2).judged) == 2


@pytest.mark.parametrize(("models", "most"), [(3, 300), (4, 200), (6, 400)])
def test_survey_looks_at_a_limited_number_of_thresholds(
    models: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be a simulation."""

    def judge(_: Predictor, active: int, thresholds: tuple[int, ...]) -> Judged:
        return Judged(thresholds, float(active), "simulated")

    monkeypatch.setattr(survey_module, "_judge", judge)
    times = tuple(StepTime.affine(step) for step in range(1, models + 1))
    row = (1 / models,) * models
    for contention in (0.0, 1.0):
        network = Network(times, (row,) * models, keep_commit(models), (contention,) * models)
        for active in (4, 6, 16, 64):
            found = survey(network, active)
            assert 1 < len(found.judged) <= most
            assert found.eager.thresholds == (1,) * models


def test_step_times_between_and_beyond_measurements() -> None:
    measured = StepTime(((1.0, 1.0), (4.0, 2.5), (8.0, 2.0)))
    assert [measured.of(batch) for batch in (0.5, 1, 2, 4, 6, 8, 99)] == [1.0, 1.0, 1.5, 2.5, 2.25, 2.0, 2.0]
    line = StepTime.affine(1.0, 0.5)
    assert [line.of(batch) for batch in (1, 3, 100)] == [1.5, 2.5, 51.0]
    assert line.zoomed(10).of(3) == line.of(30)


def test_tokens_per_step() -> None:
    assert paper_pair().tokens_per_step == pytest.approx(1 / 1.35)
    assert load("ME", "A").tokens_per_step == pytest.approx(1)
    assert paper_pair().shares == pytest.approx((1 / 1.35, 0.35 / 1.35))
    # Left for good after the first step.
    once = Network((StepTime.affine(1),) * 2, ((0.0, 1.0), (0.0, 1.0)), keep_commit(2))
    assert once.shares == pytest.approx((0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_times": (StepTime.affine(1),)}, "two or more models"),
        ({"routing": ((0.5, 0.5), (1.0,))}, "routing: 2 models need 2 rows of 2"),
        ({"routing": ((0.5, 0.4), (1.0, 0.0))}, "sums to 0.9"),
        ({"routing": ((1.5, -0.5), (1.0, 0.0))}, "routing: values must be 0 or more"),
        ({"commit": ((1.0, 0.0),)}, "commit: 2 models"),
        ({"commit": ((0.0, 0.0), (0.0, 0.0))}, "commit: no move"),
        ({"contention": (1.0,)}, "contention: 1 values for 2 models"),
        ({"contention": (1.0, -1.0)}, "contention: factors"),
        ({"handoff": -1.0}, "handoff: -1.0 s"),
        ({"handoff": float("nan")}, "handoff: nan s"),
        ({"names": ("a",)}, "names: 1 values"),
    ],
)
def test_descriptions_that_make_no_sense(change: dict[str, object], message: str) -> None:
    facts: dict[str, object] = {
        "step_times": (StepTime.affine(1), StepTime.affine(2)),
        "routing": ((0.5, 0.5), (1.0, 0.0)),
        "commit": rewrite_commit(2),
    }
    with pytest.raises(NetworkError, match=message):
        Network(**(facts | change))  # type: ignore[arg-type]


def test_numbers_out_of_range() -> None:
    with pytest.raises(NetworkError, match="sizes must be positive and rise"):
        StepTime(((2.0, 1.0), (1.0, 2.0)))
    with pytest.raises(NetworkError, match="not a positive time"):
        StepTime(((1.0, 0.0),))
    with pytest.raises(NetworkError, match="per request"):
        StepTime.affine(1, -1)
    with pytest.raises(NetworkError, match="there: 2 is not a probability"):
        Network.pair((StepTime.affine(1), StepTime.affine(2)), 2)
    with pytest.raises(ValueError, match="must be 1 or more"):
        plan(paper_pair(), 0)


@pytest.mark.parametrize("factors", [(), (1.5, 0.1), (1.0, 1.0), (20.0, 20.0)])
def test_bounds_are_plain_numbers(factors: tuple[float, ...]) -> None:
    """They travel in messages, whose encoder knows no numbers of numpy."""
    for concurrency in (1, 4, 64, 256):
        times = StepTime(((1.0, 1.2e-3), (16.0, 1.4e-3))), StepTime(((1.0, 0.015), (16.0, 0.018)))
        network = Network(times, ((0.65, 0.35), (1.0, 0.0)), rewrite_commit(2), factors)
        assert type(ideal(network, concurrency)) is float
