"""Windows of several runs of one experiment on the same models in the same place, and what each is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.experiment_case import AUTO, EAGER, ITSELF, LARGE, PLANNED, STD, TROUTERD, Case, Record
from bench.experiment_result import Result
from bench.experiment_settings import told
from bench.ideal import ideal_of

OTHER_RUN = "\\*"
"""Behind a ratio to a window of another run."""
AT_ONCE = "\\*"
"""Behind times to the first token of requests that all began at once, before the window."""
_LEAST = {"p95": 20, "p99": 100}
"""Samples that a percentile takes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A window and its run."""

    record: Record
    run: int
    """Number of its command."""
    file: int
    """Number of its result: a command has one for each of its experiments."""

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

    def time_of(self, field: str, key: str) -> float | None:
        """A mean or percentile of a window's times; None: not known, or there were too few of them.

        Windows of before answers had seeds are left out with their whole answers: only such as had been cut short ended in them.
        """
        window = self.record.window
        times = window.get(field) or {}
        if field == "request_ms" and "seed" not in window:
            return None
        if field != "gap_ms" and "count" not in times:
            # Of a file from before they were counted: as many requests began in a window as ended, or all at once before it.
            count = self.case.streams if field == "ttft_ms" and self.began_at_once else window["requests"] or 0
            return self.of(field, key) if count >= _LEAST.get(key, 1) else None
        return self.of(field, key)

    @property
    def began_at_once(self) -> str:
        """A mark, where the times to the first token are those of all requests beginning at once."""
        return AT_ONCE if (self.record.window.get("extra") or {}).get("ttft_of") == "start" else ""

    @property
    def same_as(self) -> str:
        """The way to wait whose thresholds were the same: that window stands for this one as well; '' for a window of its own."""
        return str(self.record.facts.get("same_as", ""))

    @property
    def spread(self) -> tuple[float, float] | None:
        """Least and most token/s of its repeats; None: there is one window alone."""
        rates = [float(one["tokens_per_second"]) for one in self.record.window.get("repeats") or ()]
        return (min(rates), max(rates)) if len(rates) > 1 else None

    @property
    def of_ideal(self) -> float | None:
        """Share of what requests that never wait would write, in steps like those of this window; by the models' own counts."""
        ideal = ideal_of(self.record.window)
        return sum(self.record.window["tokens_per_model"].values()) / ideal if ideal else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """To another window's token/s."""

    value: float
    same_run: bool

    def times(self, factor: float) -> Ratio:
        """The same runs, another value."""
        return Ratio(self.value * factor, self.same_run)

    @property
    def mark(self) -> str:
        """Behind a value of two runs."""
        return "" if self.same_run else OTHER_RUN

    def __str__(self) -> str:
        return f"{self.value:.2f}{self.mark}"


def over(one: Measured | None, other: Measured | None) -> Ratio | None:
    """One window's token/s by another's; None where one is missing."""
    return Ratio(one.rate / other.rate, one.run == other.run) if one and other and other.rate else None


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
        runs: dict[object, int] = {}
        self._all = [
            Measured(record, runs.setdefault(result.command or file, file), file)
            for file, result in enumerate(results)
            for record in result.records
        ]
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
    def device(self) -> str:
        """In whose seconds cost is told."""
        return "device" if self.head["placement"] == "cpu" else "GPU"

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
        """Of trouterd's ways to wait the fastest, which is known afterwards only; wrong thresholds are none."""
        ways = (PLANNED, AUTO, EAGER, "")
        found = [
            one for one in self.select(workload=workload, subject=subject, streams=streams) if one.case.batching in ways
        ]
        return max(found, key=lambda one: one.rate, default=None)

    def learned(self, workload: str, subject: str, streams: int) -> Measured | None:
        """With the controller's lists, as the daemon does it unless told otherwise; one stream alone never waits."""
        way = AUTO if streams > 1 else None
        return next(iter(self.select(workload=workload, subject=subject, streams=streams, batching=way)), None)

    def beside(self, one: Measured, *, subject: str, system: str) -> Measured | None:
        """A window of the same workload and streams: of the same file if it has one, else of the same run, else of the latest."""
        case = one.case
        others = [
            other
            for other in self._all
            if other.case.system == system
            and other.case.subject == subject
            and other.case.workload == case.workload
            and other.case.streams == case.streams
        ]
        latest = reversed(others)
        return max(latest, key=lambda other: (other.file == one.file, other.run == one.run), default=None)

    def ratio(self, one: Measured, *, subject: str, system: str = TROUTERD) -> Ratio | None:
        """To a window of the same workload and streams."""
        return over(one, self.beside(one, subject=subject, system=system))

    def large_only(self, one: Measured) -> list[Measured]:
        """The large model without routing, in each way to serve it that was measured at this workload and these streams."""
        found = (self.beside(one, subject=LARGE, system=system) for system in self.large_systems)
        return [other for other in found if other is not None]

    def best_large(self, one: Measured) -> Measured | None:
        """The fastest of these."""
        return max(self.large_only(one), key=lambda other: other.rate, default=None)

    def fastest_large(self, workload: str, streams: int) -> Measured | None:
        """The large model without routing, in the fastest way to serve it."""
        found = [
            one
            for system in self.large_systems
            for one in self.select(system=system, workload=workload, subject=LARGE, streams=streams)
        ]
        return max(found, key=lambda one: one.rate, default=None)

    def to_large(self, one: Measured) -> Ratio | None:
        """To the fastest of these."""
        return over(one, self.best_large(one))

    def cost(self, one: Measured, field: str) -> Ratio | None:
        """What 1,000 tokens cost, by the fastest of these.

        Args:
            one: the window.
            field: `gpu_seconds_per_1000` or `large_forwards_per_1000`.
        """
        other = self.best_large(one)
        own, others = one.of(field), other.of(field) if other else None
        return Ratio(own / others, one.run == other.run) if other and own is not None and others else None

    def to_routed_large(self, one: Measured) -> Ratio | None:
        """To the large model of the daemon that routes."""
        return self.ratio(one, subject=LARGE)

    @property
    def large_systems(self) -> list[str]:
        """Ways to serve the large model without routing, in the order of measuring."""
        found = dict.fromkeys(one.case.system for one in self._all if one.case.subject == LARGE)
        return [system for system in found if system == TROUTERD or system.startswith(ITSELF)]

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
