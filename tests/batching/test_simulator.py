"""The simulator: a schedule drawn by hand, the exact chain, and what no policy may ever do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batching.loads import load, paper_pair
from trouterd.batching.bound import ideal
from trouterd.batching.chain import solve
from trouterd.batching.launch import Reason, clamp
from trouterd.batching.network import Network, StepTime, keep_commit
from trouterd.batching.policies import Choice, Delayed, Instant, Policy, Serial, Synchronous, constant
from trouterd.batching.simulator import StalledError, simulate
from trouterd.batching.workload import MarkovWorkload, ScriptWorkload

TOY = [[0, 0, 0], [0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0]]
"""Three requests whose schedules have the mean latencies of arXiv 2610.12242, figure 4, at a large step of 3.5 small ones."""


@pytest.mark.parametrize(
    ("policy", "ends"),
    [
        (Delayed([[1], [1, 2, 2]]), (3, 12, 11)),  # 8.67
        (constant((1, 1)), (3, 13.5, 16)),  # 10.83
        (Serial(Choice.ALTERNATE), (10, 14.5, 14.5)),  # 13.00
        (Serial(Choice.LAST_FIRST), (10, 14.5, 14.5)),
        (Synchronous(), (8, 16, 16)),  # 13.33
        (Serial(Choice.MOST_WAITING), (6.5, 12, 11)),
        (Serial(Choice.STAY), (3, 13, 12)),
    ],
)
def test_toy_schedule(policy: Policy, ends: tuple[float, ...]) -> None:
    network = Network.pair((StepTime.affine(1), StepTime.affine(3.5)), 0.3)
    outcome = simulate(network, policy, ScriptWorkload(TOY), 100)
    assert outcome.ends == pytest.approx(ends)
    assert outcome.mean_latency == pytest.approx(sum(ends) / 3)
    assert outcome.steps == (11, 4)


@pytest.mark.parametrize(
    ("network", "concurrency", "thresholds"),
    [
        (paper_pair(), 4, (1, 1)),
        (paper_pair(), 4, (1, 3)),
        (paper_pair(), 3, (2, 2)),
        (load("R-Stitch", "A"), 3, (1, 1)),
        (load("R2R 10%", "A", 1.0), 4, (1, 1)),
        (load("R2R 10%", "A", 1.0), 4, (2, 3)),
        (Network.pair((StepTime.affine(2), StepTime.affine(7)), 0.2, contention=(1.8, 0.06)), 3, (1, 2)),
        (Network(tuple(map(StepTime.affine, (1.0, 2.0, 4.0))), ((0.5, 0.3, 0.2),) * 3, keep_commit(3)), 3, (1, 1, 2)),
    ],
)
def test_exact_chain_within_the_error_of_the_sample(
    network: Network, concurrency: int, thresholds: tuple[int, ...]
) -> None:
    runs = [
        simulate(network, constant(thresholds), MarkovWorkload(network.routing, concurrency, seed), 6_000)
        for seed in range(12)
    ]
    tokens = np.array([run.tokens_per_second for run in runs])
    error = float(tokens.std(ddof=1)) / math.sqrt(len(tokens))
    exact = solve(network, concurrency, thresholds).tokens_per_second
    assert abs(float(tokens.mean()) - exact) < 4 * error + 1e-3 * exact
    assert error < 0.01 * exact


def test_same_seed_same_run() -> None:
    network = load("R2R 10%", "A")

    def run(seed: int) -> float:
        return simulate(network, constant((1, 2)), MarkovWorkload(network.routing, 5, seed), 2_000).seconds

    assert run(1) == run(1) != run(2)


def test_contention_and_busy_time() -> None:
    """Two requests for ever at two models: each runs at half its speed."""
    network = Network((StepTime.affine(2), StepTime.affine(2)), ((1.0, 0.0), (0.0, 1.0)), keep_commit(2), (1.0, 1.0))
    outcome = simulate(network, constant((1, 1)), ScriptWorkload([[0] * 5, [1] * 5]), 100)
    assert outcome.seconds == pytest.approx(20)
    assert outcome.busy == pytest.approx((20, 20))
    assert outcome.batches == (5, 5)


def test_lone_request_is_let_go_by_linger_and_by_guard() -> None:
    network = Network.pair((StepTime.affine(1), StepTime.affine(2)), 0.5)
    policy = Delayed([[5], [5]], linger=0.25)
    outcome = simulate(network, policy, ScriptWorkload([[0, 0, 0, 0, 0, 0, 0, 0], [1]]), 100)
    # The guard lets the first one go whenever nothing runs: at 0 s, from 2.25 s on. The second waits from 0 s, the first from 1 s.
    assert outcome.longest_hold == pytest.approx(0.25)
    assert policy.reasons[Reason.LINGER] == 2
    assert policy.reasons[Reason.GUARD] == 7


def test_the_way_of_a_hand_off_is_no_hold() -> None:
    network = Network.pair((StepTime.affine(1), StepTime.affine(2)), 0.5, handoff=0.25)
    alone = simulate(network, constant((1, 1)), ScriptWorkload([[0, 1, 0, 1]]), 100)
    assert alone.longest_hold == 0
    assert alone.seconds == pytest.approx(6.75)
    # The first one comes at 1.25 s, the second at 2.25 s.
    both = simulate(network, constant((1, 2)), ScriptWorkload([[0, 1], [0, 0, 1]]), 100)
    assert both.longest_hold == pytest.approx(1.0)


class Impatient(Delayed):
    """Eager, and asked no more often than it takes."""

    def __init__(self, most: int) -> None:
        super().__init__([[1], [1]])
        self._left = most

    def launches(self, instant: Instant) -> Sequence[int]:
        assert self._left, "the clock stands still"
        self._left -= 1
        return super().launches(instant)


@pytest.mark.parametrize("contention", [(0.0, 0.0), (1.0, 0.3)])
@pytest.mark.parametrize("handoff", [0.0, 1e-9])
def test_steps_end_that_the_clock_cannot_tell_apart(contention: tuple[float, float], handoff: float) -> None:
    network = Network.pair((StepTime.affine(1e-9), StepTime.affine(1e12)), 0.5, contention=contention, handoff=handoff)
    outcome = simulate(network, Impatient(3000), MarkovWorkload(network.routing, 3, seed=1), 1000)
    assert sum(outcome.steps) >= 1000
    assert outcome.seconds >= 1e12


def test_dead_end_is_told() -> None:
    network = Network.pair((StepTime.affine(1), StepTime.affine(2)), 0.5)
    with pytest.raises(StalledError, match="1 requests|nothing is launched"):
        simulate(network, Delayed([[2], [2]], guard=False), ScriptWorkload([[0], [1]]), 100)
    with pytest.raises(ValueError, match="one step or more"):
        ScriptWorkload([[0], []])


TIMES = st.builds(StepTime.affine, st.floats(0.1, 10), st.floats(0, 1))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    count = draw(st.integers(2, 3))
    weights = draw(
        st.lists(
            st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any), min_size=count, max_size=count
        )
    )
    routing = tuple(tuple(weight / sum(row) for weight in row) for row in weights)
    contention = draw(st.lists(st.sampled_from([0.0, 0.06, 0.5, 1.0, 1.8]), min_size=count, max_size=count))
    times = draw(st.lists(TIMES, min_size=count, max_size=count))
    return Network(tuple(times), routing, keep_commit(count), tuple(contention))


def scripts(models: int) -> st.SearchStrategy[list[list[int]]]:
    script = st.lists(st.integers(0, models - 1), min_size=1, max_size=12)
    return st.lists(script, min_size=1, max_size=7)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_clamped_lists_need_no_guard(data: st.DataObject) -> None:
    """Whatever was asked for, and however many requests are left."""
    network = data.draw(networks())
    work = data.draw(scripts(network.size))
    asked = data.draw(
        st.lists(st.lists(st.integers(-1, 9), min_size=7, max_size=7), min_size=network.size, max_size=network.size)
    )
    most = data.draw(st.none() | st.integers(1, 9))
    rows = [clamp(row, active, most) for active, row in enumerate(zip(*asked, strict=True), start=1)]
    policy = Delayed(list(zip(*rows, strict=True)), guard=False)
    outcome = simulate(network, policy, ScriptWorkload(work), 10_000)
    assert sum(outcome.steps) == sum(map(len, work))
    assert max(outcome.ends) < float("inf")


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_policy_strands_a_request(data: st.DataObject) -> None:
    """Impossible thresholds included; and nothing is held longer than linger, nor is the bound ever exceeded."""
    network = data.draw(networks())
    work = data.draw(scripts(network.size))
    lists = data.draw(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=network.size, max_size=network.size)
    )
    linger = data.draw(st.none() | st.floats(0, 5))
    policies: list[Policy] = [Delayed(lists, linger), Synchronous(), *map(Serial, Choice)]
    for policy in policies:
        outcome = simulate(network, policy, ScriptWorkload(work), 10_000)
        assert sum(outcome.steps) == sum(map(len, work))
        assert outcome.steps_per_second <= ideal(network, len(work), outcome.shares) * (1 + 1e-9)
        if policy is policies[0] and linger is not None:
            assert outcome.longest_hold <= linger + 1e-9 * outcome.seconds


@settings(max_examples=40, deadline=None)
@given(networks(), st.integers(1, 12), st.data())
def test_bound_of_endless_requests(network: Network, concurrency: int, data: st.DataObject) -> None:
    thresholds = clamp(
        data.draw(st.lists(st.integers(1, 12), min_size=network.size, max_size=network.size)), concurrency
    )
    outcome = simulate(network, constant(thresholds), MarkovWorkload(network.routing, concurrency, 0), 500)
    assert outcome.steps_per_second <= ideal(network, concurrency, outcome.shares) * (1 + 1e-9)


def test_policies_see_waiting_requests_only() -> None:
    instant = Instant(now=3.0, ready=(0, 2), oldest=(float("inf"), 1.0), running=(False, False), active=4)
    assert Serial(Choice.MOST_WAITING).launches(instant) == [1]
    assert list(Synchronous().launches(instant)) == [1]
    assert constant((1, 3), linger=2.0).launches(instant) == [1]
    assert constant((1, 3), linger=2.5).wake(instant) == pytest.approx(3.5)


def test_hand_offs_take_their_time() -> None:
    network = Network.pair((StepTime.affine(1), StepTime.affine(3.5)), 0.3, handoff=0.25)
    # Alone: every change of model adds one hand-off.
    outcome = simulate(network, constant((1, 1)), ScriptWorkload([[0, 1, 0, 0, 1, 1, 0]]), 100)
    assert outcome.seconds == pytest.approx(4 + 3 * 3.5 + 4 * 0.25)
    # All step together: a round begins when everybody is there.
    both = simulate(network, Synchronous(), ScriptWorkload([[0, 0, 0], [0, 1, 0]]), 100)
    assert both.ends == pytest.approx((1 + 0.25 + 3.5 + 0.25 + 1,) * 2)


def test_the_guard_waits_for_those_on_their_way() -> None:
    network = Network.pair((StepTime.affine(1), StepTime.affine(3)), 0.3, handoff=0.5)
    policy = Delayed([[1], [2]])
    outcome = simulate(network, policy, ScriptWorkload([[0, 1], [0, 1]]), 100)
    assert outcome.ends == pytest.approx((1 + 0.5 + 3,) * 2)
    assert policy.reasons[Reason.GUARD] == 0
    with pytest.raises(StalledError):
        simulate(network, Delayed([[1], [2]], guard=False), ScriptWorkload([[0, 1], [0, 0, 0]]), 100)
