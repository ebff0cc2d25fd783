"""Which thresholds a window of a running daemon gets, without a daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.experiment_case import TURNS, Case, CaseError, Record
from bench.experiment_fleet import Assumed, OpenedFleet, planned
from bench.experiment_routes import Routes
from bench.experiment_settings import Settings
from bench.experiment_setup import Setup
from bench.experiment_steps import StepTimes
from bench.patterns import ME, R2R
from bench.target import Target
from tests.bench.experiment_fakes import case, window
from trouterd.batching.network import Network, StepTime

NAMES = ("small", "large")
STEPS = {"small": 1.0, "large": 18.0}
"""Milliseconds."""


class FakeFleet:
    """What it was told to do, in order."""

    def __init__(self) -> None:
        self.targets = {R2R.route: Target("trouterd r2r", "unix:/nowhere", "r2r", 1)}
        self.told: list[tuple[str, Any]] = []

    def wait_ready(self) -> None:
        """It never ends."""

    def live(self, key: str, value: Any) -> Any:
        self.told.append((key, value))

    @contextmanager
    def holding(self, settings: Mapping[str, Any]) -> Iterator[None]:
        self.told += [*settings.items()]
        yield
        self.told.append(("restored", list(settings)))

    def pin(self, thresholds: Mapping[str, int], count: int) -> None:
        self.told.append(("pin", (dict(thresholds), count)))

    def call(self, verb: str) -> Any:
        assert verb == "batching"
        return {"controller": {}, "models": {name: {"thresholds": []} for name in NAMES}}


def known() -> StepTimes:
    found = StepTimes()
    for name, step in STEPS.items():
        one = case(name, 16)
        own = {name: {"steps": 99, "batch": 16.0, "step_ms": step, "overlap_ms": 0.0}}
        found.learn(one, window(one, 900.0, overlap=own))
    return found


def opened(fleet: FakeFleet, steps: StepTimes, *, measured: bool = True, **setup: Any) -> OpenedFleet:
    made = Setup(("Qwen3-0.6B", "Qwen3-32B"), ("cuda:0", "cuda:0"), (1, 1), **setup)
    assumed = Assumed(made.contention, measured)
    return OpenedFleet(fleet, Path(), ExitStack(), made, Routes((R2R,)), steps, assumed)  # type: ignore[arg-type]


def record(fleet: OpenedFleet, one: Case) -> Record:
    return fleet.record(one, lambda _, asked: window(asked, 900.0))


def expected(contention: tuple[float, ...] = (), *, turns: bool = False) -> tuple[int, ...]:
    times = tuple(StepTime.affine(step / 1e3) for step in STEPS.values())
    network = Network(times, ((0.65, 0.35), (1.0, 0.0)), ((1.0, 0.0), (1.0, 1.0)), contention, turns=turns)
    return planned(network, 16).thresholds


PLANNED = case(R2R.key, 16, "planned")


def test_what_is_known_beforehand() -> None:
    fleet = FakeFleet()
    found = record(opened(fleet, known()), PLANNED)
    assert found.facts["contention"] == [1.5, 0.35]
    assert found.facts["contention_by"] == "assumed"
    assert fleet.told == [("pin", (dict(zip(NAMES, expected((1.5, 0.35)), strict=True)), 16))]


def test_windows_before_tell_it() -> None:
    steps, eager = known(), case(R2R.key, 16, "eager")
    own = {
        "small": {"steps": 900, "batch": 8.0, "step_ms": 1.25, "overlap_ms": 1.0},
        "large": {"steps": 100, "batch": 8.0, "step_ms": 36.0, "overlap_ms": 22.5},
    }
    steps.learn(eager, window(eager, 900.0, overlap=own))
    found = record(opened(FakeFleet(), steps), PLANNED)
    assert found.facts["contention"] == pytest.approx([1 / 3, 4.0])
    assert found.facts["contention_by"] == "measured"
    assert found.facts["predicted"] > 0
    unasked = record(opened(FakeFleet(), steps, measured=False), PLANNED)
    assert unasked.facts["contention_by"] == "assumed"
    given = record(opened(FakeFleet(), steps, given_contention=(0.5, 2.0)), PLANNED)
    assert (given.facts["contention"], given.facts["contention_by"]) == ([0.5, 2.0], "given")


def test_three_models_in_turns_have_no_plan() -> None:
    steps = StepTimes()
    for name in (*NAMES, "middle"):
        one = case(name, 16)
        steps.learn(one, window(one, 900.0, step_ms={name: 5.0}, batch={name: 16.0}))
    setup = Setup(("a", "b", "c"), ("cuda:0",) * 3, (1, 1, 1), Settings({"batching.overlap": False}))
    fleet: Any = FakeFleet()
    three = OpenedFleet(fleet, Path(), ExitStack(), setup, Routes((ME,)), steps, Assumed(()))
    with pytest.raises(CaseError, match="known for two, not for 3"):
        record(three, case(ME.key, 16, "planned"))


def test_turns_have_a_plan_of_their_own() -> None:
    fleet = FakeFleet()
    found = record(opened(fleet, known()), case(R2R.key, 16, "planned", system=TURNS))
    pin = ("pin", (dict(zip(NAMES, expected(turns=True), strict=True)), 16))
    assert fleet.told == [pin, ("batching.overlap", False), ("restored", ["batching.overlap"])]
    assert found.facts["contention_by"] == "turns"
    fleet = FakeFleet()
    always = record(opened(fleet, known(), settings=Settings({"batching.overlap": False})), PLANNED)
    assert (always.facts["contention_by"], fleet.told) == ("turns", [pin])
    assert always.facts["predicted"] == found.facts["predicted"]
