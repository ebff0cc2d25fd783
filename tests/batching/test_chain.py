"""The exact chain: published values, and cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from tests.batching.loads import load, paper_pair
from trouterd.batching.chain import ChainError, solve
from trouterd.batching.network import Network, StepTime, keep_commit
from trouterd.batching.policies import constant
from trouterd.batching.simulator import simulate
from trouterd.batching.workload import MarkovWorkload

PAPER = {2: [99.0, 110.3], 3: [142.3, 158.1, 151.9], 4: [187.2, 195.4, 207.9, 190.7]}
"""Tokens/s by requests and thresholds of the large model (arXiv 2610.12242, appendix D)."""


@pytest.mark.parametrize("quantum", [None, 1e-4])
@pytest.mark.parametrize("concurrency", PAPER)
def test_reproduces_the_published_table(concurrency: int, quantum: float | None) -> None:
    found = [
        solve(paper_pair(), concurrency, (1, large), quantum=quantum).tokens_per_second
        for large in range(1, concurrency + 1)
    ]
    assert found == pytest.approx(PAPER[concurrency], abs=0.1)
    assert found.index(max(found)) == PAPER[concurrency].index(max(PAPER[concurrency]))


def test_one_request_is_never_slowed_down() -> None:
    """A token takes a small step, or small and large one with probability p."""
    for contention in ((0, 0), (1, 1), (1.8, 0.06)):
        pair = Network.pair((StepTime.affine(2), StepTime.affine(7)), 0.25, contention=contention)
        # Between two hand-overs 3 tokens are kept, one is written by the large model; 4 small steps and a large one.
        assert solve(pair, 1, (1, 1)).tokens_per_second == pytest.approx(4 / (4 * 2 + 7))


def test_models_that_take_turns() -> None:
    """Thresholds of N + 1 in all leave no overlap: contention then changes nothing."""
    for contention in ((0, 0), (1, 1), (2, 0.5)):
        pair = Network.pair((StepTime.affine(1), StepTime.affine(3)), 1.0, contention=contention)
        # Both requests always move together: 2 steps in 1 s, 2 in 3 s.
        assert solve(pair, 2, (1, 2)).steps_per_second == pytest.approx(4 / 4)


def test_two_models_in_perfect_alternation() -> None:
    """Both requests begin at the entry and always move on together, so that no threshold is needed for full batches."""
    pair = Network.pair((StepTime.affine(1), StepTime.affine(3)), 1.0)
    assert solve(pair, 2, (1, 1)).steps_per_second == pytest.approx(4 / 4)


@pytest.mark.parametrize("contention", [0.0, 0.5, 1.0])
def test_contention_slows_the_overlap_down(contention: float) -> None:
    """Two requests that never leave the models which they go to first."""
    times = (StepTime.affine(1), StepTime.affine(2), StepTime.affine(2))
    routing = ((0.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    network = Network(times, routing, keep_commit(3), (contention,) * 3)
    # Per event of the long run: with probability 1/2 they are together (2 steps in 2 s), else apart (2 steps in 2 s, prolonged).
    assert solve(network, 2, (1, 1, 1)).steps_per_second == pytest.approx(2 / (2 * (1 + contention / 2)))


def test_batch_sizes_matter() -> None:
    pair = Network.pair((StepTime.affine(1, 0.5), StepTime.affine(2, 1)), 1.0)
    assert solve(pair, 3, (3, 1)).steps_per_second == pytest.approx(6 / (2.5 + 5))


def test_tokens_by_both_accounts() -> None:
    """Rewards of the chain, and shares of the routing matrix."""
    for network in (load("R-Stitch", "A"), load("Co-LLM 20%", "H", 1.0)):
        result = solve(network, 3, (1, 2))
        assert result.tokens_per_second == pytest.approx(result.steps_per_second * network.tokens_per_step, rel=1e-9)


def test_three_models() -> None:
    times = tuple(StepTime.affine(step) for step in (1.0, 2.0, 4.0))
    network = Network(times, ((0.5, 0.3, 0.2),) * 3, keep_commit(3))
    assert solve(network, 1, (1, 1, 1)).tokens_per_second == pytest.approx(1 / (0.5 + 0.6 + 0.8))
    # All three always step together.
    assert solve(network, 3, (1, 1, 1)).steps_per_second < 3 / (0.5 + 0.6 + 0.8)


def test_hand_offs_that_take_time() -> None:
    pair = Network.pair((StepTime.affine(2), StepTime.affine(7)), 0.25, handoff=0.5)
    assert solve(pair, 1, (1, 1)).tokens_per_second == pytest.approx(4 / (4 * 2 + 7 + 2 * 0.5))
    # Both requests always move together, whichever model is the slower one.
    for times in ((1, 3), (3, 1)):
        together = Network.pair((StepTime.affine(times[0]), StepTime.affine(times[1])), 1.0, handoff=0.25)
        assert solve(together, 2, (1, 1)).steps_per_second == pytest.approx(4 / (4 + 2 * 0.25))


@pytest.mark.parametrize("handoff", [0.3e-3, 1.5e-3])
@pytest.mark.parametrize("moves", [(0.35, 1.0), (0.15, 0.15)])
def test_hand_offs_in_the_simulator(moves: tuple[float, float], handoff: float) -> None:
    pair = Network.pair((StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)), *moves, handoff=handoff)
    for thresholds in ((1, 1), (1, 3)):
        outcome = simulate(pair, constant(thresholds), MarkovWorkload(pair.routing, 4, 1), 30_000)
        assert solve(pair, 4, thresholds).steps_per_second == pytest.approx(outcome.steps_per_second, rel=0.03)


def test_refusals() -> None:
    times = tuple(map(StepTime.affine, (1.0, 2.0, 4.0)))
    three = Network(times, ((0.5, 0.3, 0.2),) * 3, keep_commit(3), handoff=0.1)
    with pytest.raises(ChainError, match="three or more models"):
        solve(three, 2, (1, 1, 1))
    with pytest.raises(ChainError, match="on its way"):
        solve(Network.pair((StepTime.affine(6), StepTime.affine(28)), 0.35, handoff=15), 2, (1, 1))
    with pytest.raises(ValueError, match="not feasible"):
        solve(paper_pair(), 2, (2, 2))
    with pytest.raises(ValueError, match="not feasible"):
        solve(paper_pair(), 2, (1,))
    with pytest.raises(ChainError, match="more than 100 states"):
        solve(load("R2R 10%", "A"), 4, (1, 1), most=100)


@pytest.mark.parametrize("rare", [1e-4, 1e-7, 1e-10])
def test_rare_moves(rare: float) -> None:
    """They settle too slowly for products. Of four requests, two wait in turn until a third comes: 4, 3, 2 are left."""
    pair = Network.pair((StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)), rare)
    # A third of each round's hand-overs happens with each of these numbers; 1 / rare small steps of requests lie between two.
    expected = 3 / (6.0e-3 * (1 / 4 + 1 / 3 + 1 / 2))
    assert solve(pair, 4, (1, 3)).tokens_per_second == pytest.approx(expected, rel=30 * rare + 1e-5)


def test_chains_of_which_some_part_is_never_reached_again() -> None:
    """Two requests stay for ever at whichever model they go to first: no law is the only one."""
    times = (StepTime.affine(1), StepTime.affine(2), StepTime.affine(2))
    routing = ((1 - 1e-9, 5e-10, 5e-10), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    with pytest.raises(ChainError, match="do not settle"):
        solve(Network(times, routing, keep_commit(3), (1.0,) * 3), 2, (1, 1, 1))
