"""Windows of several runs of one experiment on the same models in the same place, and what each is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.experiment_case import LARGE, STD, TROUTERD, Case, Record
from bench.experiment_fleet import AUTO, EAGER, PLANNED
from bench.experiment_result import Result
from bench.experiment_settings import told

OTHER_RUN = "\\*"
"""Behind a ratio to a window of another run."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A window and its run."""

    record: Record
    run: int
    """Number of its result."""

    @property
    def case(self) -> Case:
        """What was measured."""
        return self.record.case

    @property
    def rate(self) -> float:
        """Token/s."""
        return float(self.record.window["tokens_per_second"])

    def of(self, field: str, key: str = "") -> float | None:
        """A figure of the window, or an entry of one of its mappings; None: not known."""
        value: Any = self.record.window.get(field)
        if key:
            value = (value or {}).get(key)  # percentiles of nothing are None
        return None if value is None else float(value)

    @property
    def of_ideal(self) -> float | None:
        """Share of the bound that no policy exceeds."""
        ideal = self.of("ideal")
        return self.rate / ideal if ideal else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """To another window's token/s."""

    value: float
    same_run: bool

    def __str__(self) -> str:
        return f"{self.value:.2f}{'' if self.same_run else OTHER_RUN}"


class Group:
    """Of results with the same experiment, models, placement, hardware and settings.

    Args:
        results: the oldest first; of windows that were measured twice the later one counts.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        self.head = results[-1].head
        self.names: dict[str, str] = {}
        """Of subjects, for tables."""
        self._all = [Measured(record, run) for run, result in enumerate(results) for record in result.records]
        for result in results:
            self.names |= result.head.get("names", {})
        self.windows = list({one.case.key: one for one in self._all}.values())

    @property
    def title(self) -> str:
        """Models, placement and settings."""
        settings = f"; {self.settings}" if self.settings else ""
        places = {"shared": "on one card", "separate": "on a card each", "cpu": "on the CPU"}
        return f"{self.head['pair']}, {places.get(self.head['placement'], self.head['placement'])}{settings}"

    @property
    def settings(self) -> str:
        """That all systems were given; '' for none."""
        return told(self.head.get("settings", {}))

    @property
    def large(self) -> list[Measured]:
        """The large model alone."""
        return self.select(subject=LARGE)

    def name(self, subject: str) -> str:
        """Of a subject, for tables."""
        return self.names.get(subject, f"{subject} only" if subject in ("small", "middle", "large") else subject)

    def select(
        self,
        *,
        system: str = TROUTERD,
        workload: str = "",
        subject: str = "",
        batching: str | None = None,
        streams: int = 0,
    ) -> list[Measured]:
        """Windows with these properties, by streams; what is not given may be anything."""
        found = [
            one
            for one in self.windows
            if one.case.system == system
            and workload in ("", one.case.workload)
            and subject in ("", one.case.subject)
            and batching in (None, one.case.batching)
            and streams in (0, one.case.streams)
        ]
        return sorted(found, key=lambda one: one.case.streams)

    def best(self, workload: str, subject: str, streams: int) -> Measured | None:
        """Of trouterd's ways to wait the fastest; wrong thresholds are none."""
        ways = (PLANNED, AUTO, EAGER, "")
        found = [
            one for one in self.select(workload=workload, subject=subject, streams=streams) if one.case.batching in ways
        ]
        return max(found, key=lambda one: one.rate, default=None)

    def ratio(self, one: Measured, *, subject: str = LARGE, system: str = TROUTERD) -> Ratio | None:
        """To a window of the same workload and streams, the large model's or a named one; of the same run if it has one."""
        case = one.case
        others = [
            other
            for other in self._all
            if other.case.system == system
            and other.case.subject == subject
            and other.case.workload == case.workload
            and other.case.streams == case.streams
        ]
        if not others:
            return None
        other = next((other for other in reversed(others) if other.run == one.run), others[-1])
        return Ratio(one.rate / other.rate, other.run == one.run) if other.rate else None

    def to_std(self, one: Measured) -> Ratio | None:
        """To Std. Serving of the same route."""
        return self.ratio(one, subject=one.case.subject, system=STD)

    def workloads(self) -> list[str]:
        """In the order of measuring."""
        return list(dict.fromkeys(one.case.workload for one in self.windows))

    def subjects(self) -> list[str]:
        """Routes, in the order of measuring."""
        return [subject for subject in dict.fromkeys(one.case.subject for one in self.windows) if subject in self.names]

    def streams(self, windows: Iterable[Measured]) -> list[int]:
        """Numbers of streams, rising."""
        return sorted({one.case.streams for one in windows})
