"""Measures one window of an experiment."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import uvloop

from bench.experiment_case import Case, Measure, length
from bench.progress import Progress
from bench.target import Target
from bench.window import Window, measure
from bench.workloads import find


def measuring(seconds: float, progress: Progress) -> Measure:
    """Measures windows of `seconds`."""
    return lambda target, case: asdict(_measured(target, case, length(case, seconds), progress))


def _measured(target: Target, case: Case, seconds: float, progress: Progress) -> Window:
    """
    Raises:
        bench.endpoint.EndpointError: the system under test failed.
    """
    workload = find(case.workload)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            measure(
                target,
                workload,
                case.streams,
                seconds=seconds,
                settle=case.settle,
                progress=lambda part: progress.show(case.key, part),
            )
        )
