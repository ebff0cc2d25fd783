"""Measures the windows of an experiment, one stage after another, as long as its budget lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiment_case import Case, CaseError, Measure, Opened, Record, Stage, within
from bench.experiment_dropped import summary
from bench.experiment_result import ResultError, ResultFile
from bench.experiment_steps import StepTimes
from bench.kv_pools import RoomError
from bench.progress import Progress
from trouterd.daemon import DaemonError


class Runner:
    """One run.

    Args:
        stages: what is to be measured.
        files: one for each experiment; they grow.
        seconds: of a window.
        budget: seconds for everything.
        measure: a window.
        steps: grows by windows.
        progress: of all windows.
        clock: for tests.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        files: Sequence[ResultFile],
        *,
        seconds: float,
        budget: float,
        measure: Measure,
        steps: StepTimes,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stages, self._files = stages, files
        self._seconds, self._measure, self._steps = seconds, measure, steps
        self._progress, self._clock = progress, clock
        self._end = clock() + budget
        self._most: dict[tuple[str, str], int] = {}
        """Requests that KV pools have room for, where there were too many, by workload and experiment: all of an experiment are
        compared with each other, but another one may have had no daemon whose pools are so small."""
        self._left = {stage.name: list(stage.cases) for stage in stages}
        self._untold: list[str] = []
        """Keys of what was dropped since the last line of progress."""

    def run(self) -> None:
        """All of it.

        Raises:
            ResultError: a file cannot be written, at the beginning or at the end.
        """
        for file in self._files:
            file.save()
        for stage in self._stages:
            if self._fitting(stage, started=False):
                self._tell_dropped()
                self._stage(stage)
            else:
                self._drop(stage)
        self._tell_dropped()
        for file in self._files:
            file.result.complete = not (file.result.dropped or file.result.failures)
            file.save()

    def _stage(self, stage: Stage) -> None:
        with TemporaryDirectory(prefix="trouterd-bench-") as name:
            try:
                with stage.opened(Path(name)) as opened:
                    self._cases(stage, opened)
            except (CaseError, DaemonError, RuntimeError, OSError) as error:
                # The others can still be measured.
                for case in self._left[stage.name]:
                    self._progress.done(self._fail(case, error))
                self._left[stage.name] = []

    def _cases(self, stage: Stage, opened: Opened) -> None:
        left = self._left[stage.name]
        while left:
            fitting = self._fitting(stage, started=True)
            if not fitting:
                self._drop(stage)
                return
            left.remove(fitting[0])
            self._case(fitting[0], opened)

    def _case(self, case: Case, opened: Opened) -> None:
        """A window; several where its experiments have room for different numbers of streams."""
        left = case.experiments
        while left:
            streams = max(self._room(case, letter) for letter in left)
            own = tuple(letter for letter in left if self._room(case, letter) == streams)
            lacking = self._lacking(replace(case, experiments=own), streams)
            try:
                line = self._window(lacking, streams, opened)
            except RoomError as error:
                # What is measured later is to be compared with this, on whatever servers.
                self._most |= {(case.workload, letter): error.most for letter in lacking.experiments}
                continue
            left = tuple(letter for letter in left if letter not in own)
            self._progress.done(line, 0 if left else 1)

    def _room(self, case: Case, letter: str) -> int:
        """Streams of a window that one of its experiments can have."""
        return min(case.streams, self._most.get((case.workload, letter), case.streams))

    def _lacking(self, case: Case, streams: int) -> Case:
        """The window for those of its experiments that have none yet with so few streams.

        One that only another experiment has is measured again, since that may have been in another daemon.
        """
        if streams == case.streams:
            return case
        key = replace(case, streams=streams).key
        return replace(case, experiments=tuple(file.experiment for file in self._of(case) if not file.has(key)))

    def _window(self, case: Case, streams: int, opened: Opened) -> str:
        """Measure it with so many streams; a line that says what came of it. Raises RoomError."""
        if not case.experiments:
            return f"{case.key}: room for {streams} only, which have been measured"
        try:
            if not streams:
                raise CaseError("the KV pools have no room for one such request")
            record = opened.record(replace(case, streams=streams), self._measure)
        except RoomError:
            raise
        except (CaseError, RuntimeError, OSError) as error:
            return self._fail(case, error)
        if streams < case.streams:
            record = replace(record, facts={**record.facts, "asked_streams": case.streams})
        self._steps.learn(record.case, record.window)
        for file in self._of(record.case):
            file.result.records.append(record)
        self._save(record.case)
        return _line(record)

    def _of(self, case: Case) -> list[ResultFile]:
        return [file for file in self._files if file.concerns(case)]

    def _fitting(self, stage: Stage, *, started: bool) -> list[Case]:
        """Windows of the stage for which there is time, if there is to be some for the more important ones of all later stages."""
        later = self._stages[self._stages.index(stage) :]
        stages = [(0.0 if started and one is stage else one.seconds, self._left[one.name]) for one in later]
        return within(stages, self._seconds, max(0.0, self._end - self._clock()))[0][0]

    def _drop(self, stage: Stage) -> None:
        """What there is no time for, the least important ones first."""
        left = self._left[stage.name]
        ranks = {place: (case.importance, place) for place, case in enumerate(left)}
        for place in sorted(ranks, key=ranks.__getitem__, reverse=True):
            key = left[place].key
            self._untold.append(key)
            for file in self._of(left[place]):
                file.result.dropped.append(key)
        left.clear()

    def _tell_dropped(self) -> None:
        """In one line, however many they are."""
        if self._untold:
            dropped = {key for file in self._files for key in file.result.dropped}
            others = {case.key for stage in self._stages for case in stage.cases} - dropped
            self._progress.done(f"no time left: {summary(self._untold, others)}", len(self._untold))
            self._untold.clear()

    def _fail(self, case: Case, error: Exception) -> str:
        """Note it; a line that tells it."""
        reason = " ".join(str(error).split()) or type(error).__name__
        for file in self._of(case):
            file.result.failures.append((case.key, reason))
        self._save(case)
        return f"{case.key}: failed: {reason}"

    def _save(self, case: Case) -> None:
        """What cannot be written now is written with the next window: there may be room again by then."""
        for file in self._of(case):
            try:
                file.save()
            except ResultError as error:
                self._progress.done(str(error), 0)


def _line(record: Record) -> str:
    window, facts = record.window, record.facts
    gap = (window["gap_ms"] or {}).get("p99")
    parts = [f"{window['tokens_per_second']:,.0f} token/s", f"gap p99 {gap:.1f} ms" if gap is not None else ""]
    if thresholds := facts.get("thresholds"):
        parts.append(f"B {', '.join(str(value) for value in thresholds.values())}")
    if predicted := facts.get("predicted"):
        parts.append(f"predicted {predicted:,.0f}")
    return f"{record.case.key}: {'; '.join(part for part in parts if part)}"
