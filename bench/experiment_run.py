"""Measures the windows of an experiment, one stage after another, as long as its budget lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.experiment_case import (
    LARGE,
    MIDDLE,
    SMALL,
    TROUTERD,
    Case,
    CaseError,
    Measure,
    Opened,
    Record,
    Stage,
    within,
)
from bench.experiment_result import Result
from bench.experiment_steps import StepTimes
from bench.kv_pools import RoomError
from bench.progress import Progress
from trouterd.daemon import DaemonError

_ALONE = (SMALL, MIDDLE, LARGE)


class Runner:
    """One run.

    Args:
        stages: what is to be measured.
        result: grows.
        path: of its file.
        seconds: of a window.
        budget: seconds for everything.
        measure: a window.
        steps: grows by the windows of models alone.
        progress: of all windows.
        clock: for tests.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        result: Result,
        path: Path,
        *,
        seconds: float,
        budget: float,
        measure: Measure,
        steps: StepTimes,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stages, self._result, self._path = stages, result, path
        self._seconds, self._measure, self._steps = seconds, measure, steps
        self._progress, self._clock = progress, clock
        self._end = clock() + budget
        self._most: dict[str, int] = {}
        """Requests of a workload that KV pools have room for, where there were too many."""
        self._left = {stage.name: list(stage.cases) for stage in stages}

    def run(self) -> None:
        """All of it."""
        self._save()
        for stage in self._stages:
            self._drop(running="")
            if self._left[stage.name]:
                self._stage(stage)
        self._result.complete = not (self._result.dropped or self._result.failures)
        self._save()

    def _stage(self, stage: Stage) -> None:
        with TemporaryDirectory(prefix="trouterd-bench-") as name:
            try:
                with stage.open(Path(name)) as opened:
                    self._cases(stage, opened)
            except (CaseError, DaemonError, RuntimeError, OSError) as error:
                # The others can still be measured.
                for case in self._left[stage.name]:
                    self._fail(case, error)
                self._left[stage.name] = []

    def _cases(self, stage: Stage, opened: Opened) -> None:
        left = self._left[stage.name]
        while True:
            self._drop(running=stage.name)
            if not left:
                return
            self._case(left.pop(0), opened)

    def _case(self, case: Case, opened: Opened) -> None:
        most = self._most.get(case.workload, case.streams)
        try:
            record = opened.record(case, self._measure) if case.streams <= most else self._fewer(case, opened, most)
        except RoomError as error:
            # What is measured later is to be compared with this, on whatever servers.
            self._most[case.workload] = error.most
            self._case(case, opened)
            return
        except (CaseError, RuntimeError, OSError) as error:
            self._fail(case, error)
            return
        if record is None:
            return
        self._learn(record.case, record.window)
        self._result.records.append(record)
        self._save()
        self._progress.done(_line(record))

    def _fewer(self, case: Case, opened: Opened, most: int) -> Record | None:
        """The same with as many streams as have room; None: that has been measured."""
        fewer = replace(case, streams=most)
        if not most:
            raise CaseError("the KV pools have no room for one such request")
        if fewer.key in {record.case.key for record in self._result.records}:
            self._progress.done(f"{case.key}: room for {most} only, which have been measured")
            return None
        record = opened.record(fewer, self._measure)
        return replace(record, facts={**record.facts, "asked_streams": case.streams})

    def _learn(self, case: Case, window: Mapping[str, Any]) -> None:
        """Step times of a model alone."""
        step_ms, batch = window["step_ms"].get(case.subject), window["batch"].get(case.subject)
        if case.subject in _ALONE and case.system == TROUTERD and step_ms and batch:
            self._steps.add(case.workload, case.subject, batch, step_ms / 1e3)

    def _drop(self, running: str) -> None:
        """What there is no time for any more."""
        stages = [(0.0 if stage.name == running else stage.seconds, self._left[stage.name]) for stage in self._stages]
        kept, dropped = within(stages, self._seconds, max(0.0, self._end - self._clock()))
        for stage in self._stages:
            self._left[stage.name][:] = [case for case in self._left[stage.name] if case.key in kept]
        for key in dropped:
            self._progress.done(f"{key}: dropped, no time left")
        self._result.dropped += dropped

    def _fail(self, case: Case, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        self._progress.done(f"{case.key}: failed: {reason}")
        self._result.failures.append((case.key, reason))
        self._save()

    def _save(self) -> None:
        self._result.save(self._path)


def _line(record: Record) -> str:
    window, facts = record.window, record.facts
    gap = (window["gap_ms"] or {}).get("p99")
    parts = [f"{window['tokens_per_second']:,.0f} token/s", f"gap p99 {gap:.1f} ms" if gap is not None else ""]
    if thresholds := facts.get("thresholds"):
        parts.append(f"B {', '.join(str(value) for value in thresholds.values())}")
    if predicted := facts.get("predicted"):
        parts.append(f"predicted {predicted:,.0f}")
    return f"{record.case.key}: {'; '.join(part for part in parts if part)}"
