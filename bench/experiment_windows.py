"""Measures one window of an experiment, with a progress bar."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.endpoint import EndpointError
from bench.experiment_case import Case, CaseError, Measure
from bench.target import Target
from bench.window import Window, measure
from bench.workloads import find


def measuring(seconds: float) -> Measure:
    """Measures windows of `seconds`."""
    return lambda target, case: asdict(_measured(target, case, seconds))


def _measured(target: Target, case: Case, seconds: float) -> Window:
    """
    Raises:
        CaseError: there is no such workload, or the system under test failed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(case.key, total=1.0)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return runner.run(
                    measure(
                        target,
                        find(case.workload),
                        case.streams,
                        seconds=seconds,
                        settle=case.settle,
                        progress=lambda part: progress.update(bar, completed=part),
                    )
                )
            except (EndpointError, ValueError) as error:
                raise CaseError(str(error)) from error
