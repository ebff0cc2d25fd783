"""By how much models slow each other down, and plans that go by it while it cannot be told."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from tests.batching.daemon import NAMES, Daemon, group
from tests.batching.plant import Plant, simulated
from trouterd.batching.contention import assumed, fit_contention
from trouterd.batching.controller import Controller, Kept
from trouterd.batching.estimate import Estimator, Learned
from trouterd.batching.network import Network, StepTime
from trouterd.batching.overlap import Overlaps, Sample
from trouterd.batching.placement import FASTER, SLOWER
from trouterd.batching.plan import plan
from trouterd.batching.report import STEPS, Report, Step


def test_contention_is_told_from_steps_that_ran_alone_and_together() -> None:
    network = Network.pair((StepTime.affine(2e-3), StepTime.affine(20e-3)), 0.35, contention=(1.0, 0.3))
    estimator, daemon = Estimator(group(shares=True)), Daemon(network, 8, overlap=True)
    for _ in range(20):
        estimator.observe(daemon.reports())
    found = estimator.network()
    assert found is not None
    assert found.contention == pytest.approx((1.0, 0.3), abs=0.15)
    assert found.step_times[0].of(4) == pytest.approx(2e-3, rel=0.1)
    assert found.step_times[1].of(4) == pytest.approx(20e-3, rel=0.1)


@pytest.mark.parametrize("factor", [0.0, 0.06, 1.0, 3.0])
def test_contention_is_told_from_steps_that_overlap_in_part(factor: float) -> None:
    """The small model runs for a while of each step of the large one, which lasts longer by what that takes from it."""
    dice = np.random.default_rng(1)
    estimator, now = Estimator(group(shares=True)), 0.0
    for part in range(11):
        small: list[Step] = []
        large: list[Step] = []
        for _ in range(40):
            # What else prolongs a step, such as its contexts, prolongs the overlap too.
            alone, share = 20e-3 * float(dice.uniform(0.9, 1.1)), float(dice.uniform(0, 1))
            seconds = alone / (1 - share * factor / (1 + factor))
            large.append(Step(now, seconds, 4))
            small += [Step(now, share * seconds, 2), Step(now + seconds, 2e-3, 2)]
            now += seconds + 2e-3
        estimator.observe(
            {
                "small": Report(now, 0.0, 8, 0, 0, 400 * part, {1: 200 * part}, {1: 200 * part}, small),
                "large": Report(now, 0.0, 8, 0, 0, 400 * part, {0: 400 * part}, {1: 400 * part}, large),
            }
        )
    found = estimator.network()
    assert found is not None
    assert found.contention[1] == pytest.approx(factor, rel=0.1, abs=0.05)
    assert found.step_times[1].of(4) == pytest.approx(20e-3, rel=0.05)


def uniform(least: float, factor: float, count: int = 1000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batches, seconds and overlaps of steps that are slowed down by a factor for `least` to all of their time."""
    dice = np.random.default_rng(2)
    batch = dice.integers(4, 40, count).astype(np.float64)
    overlap = dice.uniform(least, 1, count)
    alone = np.sqrt(batch) * dice.uniform(0.95, 1.05, count)
    return batch, alone / (1 - overlap * factor / (1 + factor)), overlap


@pytest.mark.parametrize("factor", [0.0, 0.35, 1.5, 3.0])
def test_a_few_hundred_steps_of_all_overlaps_outweigh_what_is_assumed(factor: float) -> None:
    found = fit_contention(*uniform(0.0, factor, 400), prior=SLOWER)
    assert found.factor == pytest.approx(factor, rel=0.12, abs=0.03)
    assert found.told > 0.9


def test_overlaps_that_hardly_differ_leave_what_is_assumed() -> None:
    batch, seconds, overlap = uniform(0.8, 0.0)
    found = fit_contention(batch, seconds, overlap, prior=FASTER)
    assert found.factor == pytest.approx(FASTER, rel=0.1)
    assert found.told < 0.05
    same = fit_contention(batch, seconds, np.ones_like(overlap), prior=FASTER)
    assert (same.factor, same.told) == (FASTER, 0.0)


def test_overlaps_that_go_by_the_batch_leave_what_is_assumed() -> None:
    """The time alone of a batch that always runs beside others is not known."""
    batch, seconds, _ = uniform(0.0, 0.0)
    assert fit_contention(batch, seconds, np.interp(batch, [8, 16], [0, 1]), prior=FASTER).told < 0.05


def test_what_is_assumed_of_a_pair_is_what_plans_assume() -> None:
    assert assumed(2, 0) == (SLOWER, FASTER)
    assert assumed(2, 1) == (FASTER, SLOWER)
    assert assumed(3, 1) == (1.0, 1.0, 1.0)


# Overlaps


def report(*steps: Step) -> Report:
    return Report(now=0, since=0, active=1, version=0, tokens=0, decisions=0, moves={}, runs={}, steps=list(steps))


def observed(overlaps: Overlaps, small: Sequence[Step], large: Sequence[Step]) -> dict[str, list[Sample]]:
    return overlaps.observe({"small": report(*small), "large": report(*large)})


def test_what_still_runs_when_reports_are_made_counts_for_the_steps_beside_it() -> None:
    overlaps = Overlaps(NAMES)
    assert observed(overlaps, [Step(0.0, 1.0, 2), Step(1.0, 1.0, 3)], [Step(0.0, 1.5, 4)]) == {}
    # The large model's second step had begun then.
    found = observed(overlaps, [Step(2.0, 1.0, 1)], [Step(1.5, 1.0, 5)])
    assert found == {"small": [(2, 1.0, 1.0), (3, 1.0, 1.0)], "large": [(4, 1.5, 1.0)]}
    found = observed(overlaps, [], [])
    assert found == {"small": [(1, 1.0, 0.5)], "large": [(5, 1.0, 1.0)]}


def test_prompts_and_dead_rows_slow_others_down_but_are_no_samples() -> None:
    overlaps = Overlaps(NAMES)
    observed(overlaps, [Step(0.0, 1.0, 2)], [Step(0.0, 1.0, 0)])
    assert observed(overlaps, [], []) == {"small": [(2, 1.0, 1.0)], "large": []}


def test_what_ran_beside_a_model_that_did_not_answer_is_not_known() -> None:
    overlaps = Overlaps(NAMES)
    observed(overlaps, [Step(0.0, 1.0, 2)], [])
    assert overlaps.observe({"small": report(Step(1.0, 1.0, 2))}) == {}
    assert observed(overlaps, [Step(2.0, 1.0, 2)], []) == {}
    assert observed(overlaps, [], []) == {"small": [(2, 1.0, 0.0)], "large": []}


def test_what_ran_beside_steps_before_the_first_that_was_kept_is_not_known() -> None:
    """Nobody asked for a while: of the short steps the latest are left, of the long ones all."""
    overlaps = Overlaps(NAMES)
    observed(overlaps, [Step(0.0, 1.0, 2)], [Step(0.0, 1.0, 1)])
    short = [Step(float(second), 1.0, 2) for second in range(1000, 1000 + STEPS)]
    long = [Step(10.0 * number, 10.0, 1) for number in range(1, 304)]
    assert observed(overlaps, short, long) == {}
    found = observed(overlaps, [], [])
    assert found["large"] == [(1, 10.0, 1.0)] * len([step for step in long if step.begin >= 1000.0])
    assert len(found["small"]) == STEPS


def test_steps_on_gpus_of_their_own_are_samples_at_once() -> None:
    assert observed(Overlaps(()), [Step(0.0, 1.0, 2)], [Step(0.0, 1.0, 1)]) == {
        "small": [(2, 1.0, 0.0)],
        "large": [(1, 1.0, 0.0)],
    }


# Plans

SMALL = StepTime(((1, 0.93e-3), (4, 1.16e-3), (8, 1.34e-3), (16, 2.0e-3), (20, 2.4e-3), (32, 3.0e-3), (64, 3.6e-3)))
LARGE = {
    0.35: StepTime(((1, 18.2e-3), (16, 19e-3), (25, 19.5e-3), (40, 23e-3), (56, 28e-3), (64, 30e-3))),
    0.10: StepTime(((1, 18.2e-3), (4, 19.6e-3), (16, 30.7e-3), (32, 44e-3), (64, 78e-3))),
}
"""By the share of steps that hand over: the fewer do, the more rows has a visit."""
CASES = [(64, 0.35), (64, 0.10), (16, 0.35), (16, 0.10)]


def degenerate() -> Kept:
    """Learned, without a word on how well, where every step ran beside others."""
    small, large = [(1.0, 5.59e-3), (2.0, 5.65e-3)], [(1.0, 19.2e-3), (2.0, 19.4e-3)]
    learned = {
        "small": Learned(decisions=2000, tokens=1300, moves={"large": 700}, points=small, contention=0.0),
        "large": Learned(decisions=2000, tokens=2000, moves={"small": 2000}, points=large, contention=0.206),
    }
    return Kept(learned, {"small": [min(count, 8) for count in range(1, 65)], "large": [1]})


def small_and_large(share: float, *contention: float) -> Network:
    """Qwen3-0.6B and 32B on one H200, as measured."""
    return Network.pair((SMALL, LARGE[share]), share, contention=contention)


def best_of(network: Network, requests: int) -> float:
    """Steps/s of the best thresholds: eager ones, those of the plan, and those with which no two models run at once."""
    parts = {max(1, requests * eighths // 8) for eighths in range(5)}
    candidates = {
        (1, 1),
        plan(network, requests).thresholds(requests),
        *((part, requests + 1 - part) for part in parts),
    }
    return max(simulated(network, requests, candidate) for candidate in candidates)


@pytest.mark.parametrize(("requests", "share"), CASES)
@pytest.mark.parametrize("known", [False, True])
def test_models_that_always_run_beside_each_other_end_on_about_the_best_thresholds(
    requests: int, share: float, known: bool
) -> None:
    network = small_and_large(share, 1.5, 0.35)
    plant = Plant(Controller(group(shares=True), degenerate() if known else None), network, requests)
    plant.serve(45)
    assert simulated(network, requests, plant.thresholds) > 0.95 * best_of(network, requests)
    found = plant.controller.network
    assert found is not None
    assert found.contention == pytest.approx((1.5, 0.35), rel=0.1)
    assert found.step_times[0].of(20) == pytest.approx(2.4e-3, rel=0.25)


@pytest.mark.parametrize(("requests", "share"), CASES)
def test_models_that_do_not_slow_each_other_down_do_not_wait_for_what_was_assumed(requests: int, share: float) -> None:
    network = small_and_large(share)
    plant = Plant(Controller(group(shares=True)), network, requests)
    plant.serve(60)
    assert simulated(network, requests, plant.thresholds) > 0.95 * best_of(network, requests)
    assert plant.controller.estimator.learned["small"].contention == pytest.approx(0.0, abs=0.05)


def test_a_factor_of_a_file_counts_by_how_well_it_was_told() -> None:
    learned = degenerate().learned
    assumed_again = Estimator(group(shares=True), learned).network()
    assert assumed_again is not None
    assert assumed_again.contention == (FASTER, SLOWER)
    known = {name: msgspec.structs.replace(own, contention=0.7, told=0.9) for name, own in learned.items()}
    estimator = Estimator(group(shares=True), known)
    batches = [Step(float(number), 1.0, 4) for number in range(100)]
    for _ in range(3):
        # All of them beside each other: nothing that could replace it.
        estimator.observe({"small": report(*batches), "large": report(*batches)})
    kept = estimator.network()
    assert kept is not None
    assert kept.contention == (0.7, 0.7)
