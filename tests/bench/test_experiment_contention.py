"""What models on one card do to each other, from windows."""

from __future__ import annotations

from typing import Any

import pytest

from bench.experiment_contention import Sample, Slope, fit
from bench.experiment_steps import StepTimes, longer
from bench.patterns import R2R
from tests.bench.experiment_fakes import case, window
from trouterd.batching.network import StepTime

NAMES = ("small", "large")
ALONE = {"small": 1.0, "large": 18.0}
"""Milliseconds."""


def sample(system: str, batch: float, part: float, slope: float, more: float, model: str = "large") -> Sample:
    """By the formula: a step of which `part` is overlapped."""
    step = (ALONE[model] + more * batch) / (1 - slope * part)
    return Sample(system, model, batch, step, part * step, ALONE[model])


def test_the_formula_is_found_again() -> None:
    found = fit(
        [
            sample("turns", 14, 0.0, 0.0, 0.05),
            sample("trouterd", 7, 0.9, 0.8, 0.05),
            sample("trouterd", 30, 0.6, 0.8, 0.05),
            sample("kernel at 12 %", 10, 1.0, 0.1, 0.05),
            sample("trouterd", 5, 0.5, 0.2, 0.01, model="small"),
            sample("turns", 14, 0.0, 0.0, 0.01, model="small"),
        ]
    )
    assert found.more == pytest.approx({"large": 0.05, "small": 0.01})
    assert {key: slope.value for key, slope in found.slopes.items()} == pytest.approx(
        {("trouterd", "large"): 0.8, ("kernel at 12 %", "large"): 0.1, ("trouterd", "small"): 0.2}
    )
    assert found.slopes["trouterd", "large"].windows == 2
    assert found.factors("trouterd", NAMES) == pytest.approx((0.25, 4.0))
    # The small model was not looked at there.
    assert found.factors("kernel at 12 %", NAMES) is None


def test_where_nothing_tells_hand_offs_from_overlap_all_is_overlap() -> None:
    found = fit([sample("trouterd", 14, 0.9, 0.5, 0.1)])
    assert found.more == {"large": 0.0}
    assert found.slopes["trouterd", "large"].value > 0.5


def test_no_model_gains_by_another_one_beside_it() -> None:
    found = fit([sample("turns", 10, 0.0, 0.0, 0.1), sample("trouterd", 10, 0.5, -0.03, 0.1)])
    assert found.slopes["trouterd", "large"].value == 0
    assert found.more["large"] > 0
    assert Slope(1.2, 1).factor == pytest.approx(19)


def routed(system: str, *changed: str) -> tuple[Any, dict[str, Any]]:
    one = case(R2R.key, 16, "eager", system=system, changed=changed)
    own = {
        "small": {"steps": 900, "batch": 8.0, "step_ms": 1.5, "overlap_ms": 1.0},
        "large": {"steps": 100, "batch": 8.0, "step_ms": 27.0, "overlap_ms": 18.0},
    }
    return one, window(one, 900.0, overlap=own)


def measured(*extra: tuple[Any, dict[str, Any]]) -> StepTimes:
    steps = StepTimes()
    for name in NAMES:
        alone = case(name, 16)
        own = {"steps": 100, "batch": 16.0, "step_ms": ALONE[name], "overlap_ms": 0.0}
        steps.learn(alone, window(alone, 900.0, overlap={name: own}))
    for one, found in extra:
        steps.learn(one, found)
    return steps


def test_windows_of_a_run() -> None:
    found = measured(routed("trouterd")).fit("low", R2R, NAMES)
    assert found.slopes["trouterd", "large"].value == pytest.approx(0.5)
    assert found.slopes["trouterd", "small"].value == pytest.approx(0.5)
    assert measured().fit("low", R2R, NAMES).slopes == {}
    assert measured(routed("trouterd")).fit("agent", R2R, NAMES).slopes == {}


def test_a_model_whose_steps_are_others_there_has_to_be_measured_alone_there() -> None:
    divided = routed("kernel at 12 %", "small")
    assert measured(divided).fit("low", R2R, NAMES).slopes.keys() == {("kernel at 12 %", "large")}
    alone = case("small", 16, system="kernel at 12 %", changed=("small",))
    own = {"steps": 100, "batch": 8.0, "step_ms": 1.4, "overlap_ms": 0.0}
    both = measured(divided, (alone, window(alone, 900.0, overlap={"small": own})))
    assert both.fit("low", R2R, NAMES).slopes["kernel at 12 %", "small"].value == pytest.approx(0.1)
    # Plans take the nearest that is known.
    assert [time.decode.of(8) for time in measured().of("low", NAMES, "kernel at 12 %")] == [1e-3, 18e-3]
    assert both.of("low", NAMES, "kernel at 12 %")[0].decode.of(8) == pytest.approx(1.4e-3)


def test_steps_with_hand_offs() -> None:
    time = longer(StepTime(((4, 1e-3), (16, 2e-3))), 0.05)
    assert [time.of(size) for size in (4, 16, 64)] == pytest.approx([1.2e-3, 2.8e-3, 6e-3 + 3.2e-3])
    assert longer(StepTime(((16, 2e-3),)), 0.0).of(40) == pytest.approx(2e-3)
