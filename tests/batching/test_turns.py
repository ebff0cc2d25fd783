"""Models that take turns: the chain over launches against the simulator, which follows every request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trouterd.batching.bound import ideal
from trouterd.batching.network import Network, NetworkError, StepTime, keep_commit
from trouterd.batching.placement import SEPARATE, SHARED, placed
from trouterd.batching.plan import plan
from trouterd.batching.policies import Instant, Turns
from trouterd.batching.predictor import Predictor
from trouterd.batching.simulator import simulate
from trouterd.batching.survey import survey
from trouterd.batching.workload import MarkovWorkload, ScriptWorkload

TIMES = (
    StepTime(((1, 0.8e-3), (16, 1.2e-3), (64, 2.2e-3))),
    StepTime(((1, 18e-3), (16, 19.5e-3), (64, 24e-3))),
)


def in_turns(there: float, back: float = 1.0, handoff: float = 0.3e-3) -> Network:
    return replace(Network.pair(TIMES, there, back, handoff=handoff), turns=True)


@pytest.mark.parametrize(
    ("moves", "requests", "thresholds"),
    [
        ((0.35, 1.0), 1, (1, 1)),
        ((0.35, 1.0), 4, (1, 1)),
        ((0.35, 1.0), 4, (1, 4)),
        ((0.35, 1.0), 4, (2, 3)),
        ((0.35, 1.0), 16, (2, 14)),
        ((0.35, 1.0), 16, (6, 8)),
        ((0.54, 1.0), 16, (1, 16)),
        ((0.347, 0.177), 16, (2, 14)),
        ((0.347, 0.177), 6, (1, 1)),
        ((0.1, 1.0), 64, (1, 46)),
    ],
)
def test_chain_against_the_simulator(moves: tuple[float, float], requests: int, thresholds: tuple[int, int]) -> None:
    network = in_turns(*moves)
    outcome = simulate(network, Turns(thresholds), MarkovWorkload(network.routing, requests, 3), 40_000)
    found = Predictor(network, requests).steps_per_second(requests, thresholds)
    assert found == pytest.approx(outcome.steps_per_second, rel=0.015)
    assert found <= ideal(network, requests) * (1 + 1e-9)


def test_a_schedule_by_hand() -> None:
    """Two requests; the turn passes on when the other model has somebody, and takes as long as a hand-off."""
    network = replace(Network.pair((StepTime.affine(1), StepTime.affine(4)), 0.5, handoff=0.25), turns=True)
    # 0-1 both at 0; one leaves. 1-2 the other one, at once, and leaves as well: the turn passes on, and model 1 finds both.
    outcome = simulate(network, Turns((1, 1)), ScriptWorkload([[0, 1], [0, 0, 1]]), 100)
    assert outcome.ends == pytest.approx((2 + 0.25 + 4,) * 2)
    # With B = 2 at model 0, the one that stays waits until the other one is back.
    outcome = simulate(network, Turns((2, 1)), ScriptWorkload([[0, 1, 0], [0, 0]]), 100)
    assert outcome.ends == pytest.approx((1 + 0.25 + 4 + 0.25 + 1,) * 2)


def test_the_other_model_goes_first() -> None:
    policy = Turns((1, 1))

    def instant(*ready: int, moving: bool = False, running: tuple[bool, bool] = (False, False)) -> Instant:
        oldest = tuple(0.0 if count else float("inf") for count in ready)
        return Instant(now=0.0, ready=ready, oldest=oldest, running=running, active=4, moving=moving)

    assert policy.launches(instant(4, 0)) == [0]
    assert policy.launches(instant(2, 1, running=(True, False))) == []
    assert policy.launches(instant(3, 1)) == [1]
    assert policy.launches(instant(3, 1, moving=True)) == []
    assert policy.launches(instant(3, 1)) == [0]
    assert policy.launches(instant(3, 0, moving=True)) == [0]


def test_plans_in_turns() -> None:
    network = in_turns(0.35)
    found = plan(network, 64)
    for count in (4, 16, 64):
        best = found.predicted[count - 1]
        assert best >= found.eager[count - 1] * 1.2
        assert best <= found.ideal[count - 1]
        # What a plan for models side by side takes as the best is no better here.
        other = plan(replace(network, turns=False, contention=(1.8, 0.06)), count).thresholds(count)
        rate = Predictor(network, count).steps_per_second(count, other) * network.tokens_per_step
        assert best >= 0.99 * rate
    # Contention does not matter to models that never run side by side.
    assert plan(replace(network, contention=(3.0, 3.0)), 16).predicted == plan(network, 16).predicted


def test_every_set_of_thresholds_of_few_requests() -> None:
    found = survey(in_turns(0.35), 4)
    assert {judged.method for judged in found.judged} == {"exact"}
    assert len(found.judged) == 10
    assert found.best.thresholds == (1, 4)
    assert {judged.method for judged in survey(in_turns(0.35), 64).judged} == {"reduced"}


def test_placements() -> None:
    network = in_turns(0.35)
    shared, apart = placed(network, SHARED, (), (), 1), placed(network, SEPARATE, (), (), 1)
    assert (shared.network.turns, shared.gpus, apart.network.turns, apart.gpus) == (True, 1, False, 2)
    assert placed(network, "", (), (), 1).gpus == 1


def test_of_two_models_only() -> None:
    with pytest.raises(NetworkError, match="turns: known for two models, not for 3"):
        Network((StepTime.affine(1),) * 3, ((0.5, 0.3, 0.2),) * 3, keep_commit(3), turns=True)
