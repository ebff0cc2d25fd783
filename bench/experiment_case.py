"""What an experiment is made of: windows to be measured, in stages that each start something once, the important ones first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from bench.experiment_routes import Routes
from bench.target import Target

AROUND = 1.0
"""Seconds of a window beside settling and measuring: connections, and the end of its streams."""
TROUTERD, STD, SYNCHRONOUS = "trouterd", "std serving", "step-synchronous"
"""Systems: the daemon as it is, one server per model with a dispatcher outside, and all models in step."""
TURNS = "turns"
"""The daemon whose models run one at a time."""
WHOLE = "turns, a kernel each"
"""The same from its start, with a persistent kernel for each model."""
ITSELF = "by itself"
"""Systems whose names begin so: a daemon of the large model and of nothing else."""
SMALL, MIDDLE, LARGE = "small", "middle", "large"
"""Subjects: a model alone."""
AUTO, EAGER, PLANNED = "auto", "eager", "planned"
"""How requests wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One window to be measured."""

    system: str
    """Who is under test: `trouterd`, `std serving`, `no graphs`."""
    workload: str
    subject: str
    """The route or the model that is asked: `r2r-35`, `large`."""
    streams: int
    batching: str = ""
    """`eager`, `auto`, `planned`, or `planned x 0.5`; '' where nothing could wait."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """More fields of its requests."""
    importance: int = 0
    """Those with the highest number are dropped first."""
    settle: float = 0.0
    """Seconds of load before the window."""
    repeats: int = 1
    """Windows of which it is the mean, each with load before it."""
    seconds: float = 0.0
    """Of its window at most; 0: as long as the others'."""
    prefill: float = 0.0
    """Seconds until all streams have a first token, roughly."""
    changed: tuple[str, ...] = ()
    """Models whose steps differ here from those of trouterd as it is, even where they are alone."""
    instant: bool = False
    """Its figures come with the start of its stage."""
    experiments: tuple[str, ...] = ()
    """Letters of those, of one command, that it belongs to."""

    @property
    def key(self) -> str:
        """For --only and messages: system/workload/subject/batching/streams."""
        return f"{self.system}/{self.workload}/{self.subject}/{self.batching or '-'}/{self.streams}"


class CaseError(Exception):
    """One window cannot be measured; the message says why."""


Measure = Callable[[Target, Case], Mapping[str, Any]]
"""Measures a window; its fields (`bench.window.Window`). Raises CaseError: the system under test failed."""


@dataclass(frozen=True, slots=True)
class Record:
    """One window that was measured."""

    case: Case
    window: Mapping[str, Any]
    """`bench.window.Window` as a dict."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """`thresholds` in force, what they were `predicted` to give, ..."""


class Opened(Protocol):
    """What a stage has started."""

    def record(self, case: Case, measure: Measure) -> Record:
        """Make everything ready for a window, and measure it.

        Raises:
            CaseError: it cannot be measured; others can.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Something that is started once for all of its windows."""

    name: str
    seconds: float
    """That starting and ending it take, roughly."""
    open: Callable[[Path, Routes], AbstractContextManager[Opened]]
    """Starts it, given a folder and what it serves."""
    cases: tuple[Case, ...]
    daemon: object
    """What is started, without routes. Stages of one name are one only where these are equal."""
    routes: Routes = Routes()
    most_routes: int = 0
    """0: any number."""

    def opened(self, folder: Path) -> AbstractContextManager[Opened]:
        """Starts it, with its routes."""
        return self.open(folder, self.routes)

    def repeated(self, repeats: int) -> Stage:
        """The same, with each window measured so often, from once on."""
        return replace(self, cases=tuple(replace(case, repeats=repeats) for case in self.cases))


def matching(cases: Sequence[Case], only: Sequence[str]) -> tuple[Case, ...]:
    """Those whose key matches one of some patterns of a shell; all for no pattern."""
    return tuple(case for case in cases if not only or any(fnmatchcase(case.key, pattern) for pattern in only))


def cost(case: Case, seconds: float) -> float:
    """Seconds that it takes, where its window has `seconds`."""
    return 0.0 if case.instant else case.repeats * (case.prefill + case.settle + length(case, seconds) + AROUND)


def length(case: Case, seconds: float) -> float:
    """Seconds of its window, where others have `seconds`."""
    return min(case.seconds or seconds, seconds)


def within(
    stages: Sequence[tuple[float, Sequence[Case]]], seconds: float, budget: float
) -> tuple[list[list[Case]], list[str]]:
    """What fits into a budget: the least important windows are dropped one by one, and with its last window a stage.

    Args:
        stages: seconds that each takes to start, and its windows.
        seconds: of a window.
        budget: for everything.

    Returns:
        The windows of each stage that are kept, and the keys of those that are not, in the order of dropping.
    """
    kept = [(start, list(cases)) for start, cases in stages]
    dropped: list[str] = []

    def total() -> float:
        return sum(start + sum(cost(case, seconds) for case in cases) for start, cases in kept if cases)

    while total() > budget:
        # Of equally important ones the last, so that what is there first is complete.
        _, _, stage, case = max(
            (case.importance, (place, number), cases, case)
            for place, (_, cases) in enumerate(kept)
            for number, case in enumerate(cases)
        )
        stage.remove(case)
        dropped.append(case.key)
    return [cases for _, cases in kept], dropped
