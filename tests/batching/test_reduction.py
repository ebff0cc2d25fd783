"""The reduction against reference values, the exact chain and the simulator."""

from __future__ import annotations

import pytest

from tests.batching.loads import REFERENCE, Reference, load, paper_pair
from trouterd.batching.chain import solve
from trouterd.batching.network import Network, StepTime, keep_commit
from trouterd.batching.placement import FASTER, SLOWER
from trouterd.batching.policies import constant
from trouterd.batching.predictor import Predictor
from trouterd.batching.search import all_feasible, search
from trouterd.batching.simulator import simulate
from trouterd.batching.workload import MarkovWorkload


def name(case: Reference) -> str:
    return f"{case.name}-{case.times}-{case.contention:g}-{case.concurrency}"


@pytest.mark.parametrize("case", REFERENCE, ids=name)
def test_reference_values(case: Reference) -> None:
    predictor = Predictor(case.network, case.concurrency)
    rate = predictor.steps_per_second(case.concurrency, case.thresholds)
    assert rate == pytest.approx(case.model, rel=0.01)
    assert rate == pytest.approx(case.simulated, rel=0.05)
    ones = (1,) * case.network.size
    assert predictor.steps_per_second(case.concurrency, ones) == pytest.approx(case.simulated_eager, rel=0.05)
    found = search(predictor, case.concurrency)
    # Its own choice is predicted as well as the reference's, but for the half percent that smaller thresholds may cost.
    assert found.steps_per_second >= rate * 0.99
    assert found.steps_per_second == predictor.steps_per_second(case.concurrency, found.thresholds)


@pytest.mark.parametrize("contention", [(0, 0), (1, 1), (1.8, 0.06), (0.25, 4), (FASTER, SLOWER)])
@pytest.mark.parametrize("moves", [(0.35, 1.0), (1 / 9, 1.0), (0.15, 0.15)])
def test_exact_chain(moves: tuple[float, float], contention: tuple[float, float]) -> None:
    """Wherever both run: throughput, and what the choice costs."""
    pair = Network.pair((StepTime.affine(6.0), StepTime.affine(27.9)), *moves, contention=contention)
    for concurrency in (2, 3, 4):
        predictor = Predictor(pair, concurrency)
        exact = {found: solve(pair, concurrency, found).steps_per_second for found in all_feasible(2, concurrency)}
        for thresholds, rate in exact.items():
            # Unlike factors shift the phases of both models during an overlap, which a mean number of steps does not see.
            tolerance = 0.03 if len(set(contention)) == 1 else 0.07
            assert predictor.steps_per_second(concurrency, thresholds) == pytest.approx(rate, rel=tolerance)
        assert exact[search(predictor, concurrency).thresholds] >= 0.99 * max(exact.values())


def test_published_tokens() -> None:
    predictor = Predictor(paper_pair(), 4)
    tokens = [predictor.steps_per_second(4, (1, large)) * paper_pair().tokens_per_step for large in (1, 2, 3, 4)]
    assert tokens == pytest.approx([187.2, 195.4, 207.9, 190.7], rel=0.015)


@pytest.mark.parametrize("thresholds", [(1, 1), (2, 14), (8, 9)])
@pytest.mark.parametrize("contention", [(0.5, 0.5), (1.8, 0.06), (0.25, 4), (FASTER, SLOWER)])
def test_simulator_under_partial_contention(contention: tuple[float, float], thresholds: tuple[int, int]) -> None:
    pair = Network.pair((StepTime.affine(1, 0.01), StepTime.affine(8, 0.05)), 0.35, contention=contention)
    outcome = simulate(pair, constant(thresholds), MarkovWorkload(pair.routing, 16, 3), 20_000)
    assert Predictor(pair, 16).steps_per_second(16, thresholds) == pytest.approx(outcome.steps_per_second, rel=0.06)


@pytest.mark.parametrize("handoff", [0.25e-3, 1e-3])
@pytest.mark.parametrize("thresholds", [(1, 1), (1, 5), (3, 6)])
@pytest.mark.parametrize("moves", [(0.35, 1.0), (0.347, 0.177)])
def test_hand_offs_that_take_time(moves: tuple[float, float], thresholds: tuple[int, int], handoff: float) -> None:
    pair = Network.pair((StepTime.affine(6e-3, 1e-4), StepTime.affine(28e-3, 1e-4)), *moves, handoff=handoff)
    outcome = simulate(pair, constant(thresholds), MarkovWorkload(pair.routing, 8, 3), 30_000)
    rate = Predictor(pair, 8).steps_per_second(8, thresholds)
    assert rate == pytest.approx(outcome.steps_per_second, rel=0.045)
    sooner = Network.pair(pair.step_times, *moves)
    assert rate < Predictor(sooner, 8).steps_per_second(8, thresholds)


def test_hand_offs_of_three_models() -> None:
    times = (StepTime.affine(1, 0.01), StepTime.affine(3, 0.03), StepTime.affine(8, 0.05))
    network = Network(times, ((0.5, 0.3, 0.2),) * 3, keep_commit(3), handoff=0.2)
    outcome = simulate(network, constant((1, 1, 1)), MarkovWorkload(network.routing, 8, 3), 30_000)
    assert Predictor(network, 8).steps_per_second(8, (1, 1, 1)) == pytest.approx(outcome.steps_per_second, rel=0.04)
    alone = simulate(network, constant((1, 1, 1)), MarkovWorkload(network.routing, 1, 3), 30_000)
    assert Predictor(network, 1).steps_per_second(1, (1, 1, 1)) == pytest.approx(alone.steps_per_second, rel=0.02)


def test_many_requests_as_few() -> None:
    """200 requests, of which the reduction sees 48."""
    network = load("Co-LLM 20%", "A", 1.0)
    thresholds = (50, 151)
    outcome = simulate(network, constant(thresholds), MarkovWorkload(network.routing, 200, 5), 60_000)
    assert Predictor(network, 200).steps_per_second(200, thresholds) == pytest.approx(
        outcome.steps_per_second, rel=0.05
    )


def test_requests_that_move_together() -> None:
    """Certain moves: whoever starts together stays together, in batches of all; other batch sizes would last for ever too."""
    pair = Network.pair((StepTime.affine(1), StepTime.affine(8)), 1.0)
    for count in (4, 20, 100):
        for thresholds in ((1, 1), (1, 2), (count // 2, count // 2)):
            assert Predictor(pair, count).steps_per_second(count, thresholds) == pytest.approx(2 * count / 9)
    assert solve(pair, 4, (1, 1)).steps_per_second == pytest.approx(8 / 9)


@pytest.mark.parametrize("thresholds", [(1, 1), (6, 1), (9, 4)])
def test_slow_entry(thresholds: tuple[int, int]) -> None:
    """Which of the two is the entry makes no difference."""
    pair = Network.pair((StepTime.affine(8, 0.1), StepTime.affine(1)), 0.7, back=0.2, contention=(0.1, 1.0))
    outcome = simulate(pair, constant(thresholds), MarkovWorkload(pair.routing, 12, 4), 25_000)
    assert Predictor(pair, 12).steps_per_second(12, thresholds) == pytest.approx(outcome.steps_per_second, rel=0.04)


def test_models_that_are_not_used() -> None:
    times = (StepTime.affine(1, 0.1), StepTime.affine(5, 0.2))
    never = Network.pair(times, 0.0)
    assert Predictor(never, 6).steps_per_second(6, (1, 6)) == pytest.approx(6 / 1.6)
    always = Network.pair(times, 0.5, back=0.0)
    assert Predictor(always, 6).steps_per_second(6, (1, 1)) == pytest.approx(6 / 6.2)
    left = Network((*times, StepTime.affine(2)), ((0.0, 0.5, 0.5), (0.0, 0.6, 0.4), (0.0, 1.0, 0.0)), keep_commit(3))
    outcome = simulate(left, constant((1, 1, 1)), MarkovWorkload(left.routing, 6, 1), 20_000)
    assert Predictor(left, 6).steps_per_second(6, (1, 1, 1)) == pytest.approx(outcome.steps_per_second, rel=0.03)


@pytest.mark.parametrize("moves", [(1e-13, 1e-13), (1e-17, 1e-17), (1e-17, 1e-11), (1e-11, 1e-17), (1e-11, 1e-11)])
def test_moves_that_hardly_ever_happen(moves: tuple[float, float]) -> None:
    """They are none, or their rates are numbers."""
    pair = Network.pair((StepTime.affine(1), StepTime.affine(8)), *moves)
    for thresholds in ((1, 1), (1, 6), (3, 4)):
        assert 6 / 8 - 1e-6 <= Predictor(pair, 6).steps_per_second(6, thresholds) <= 6 + 1e-6


def test_what_it_cannot_judge() -> None:
    predictor = Predictor(load("ME", "A"), 8)
    with pytest.raises(ValueError, match="only the slowest may wait"):
        predictor.steps_per_second(8, (1, 2, 1))
    with pytest.raises(ValueError, match="not feasible"):
        predictor.steps_per_second(8, (1, 1, 9))
    assert predictor.covers((1, 1, 4))
    assert not predictor.covers((1, 2, 4))
    assert not Predictor(load("ME", "A", 1.0), 8).covers((1, 1, 1))
