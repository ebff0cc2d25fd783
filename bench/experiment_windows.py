"""Measures one window of an experiment, with a progress bar."""

from __future__ import annotations

import asyncio

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.endpoint import EndpointError
from bench.experiment_case import Case, CaseError
from bench.target import Target
from bench.window import Window, measure
from bench.workloads import find


def measured(target: Target, case: Case, seconds: float) -> Window:
    """A window of `seconds`.

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
