"""Measures one window of an experiment."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import uvloop

from bench.experiment_case import Case, Measure, length
from bench.progress import Progress
from bench.repeats import merged
from bench.target import Target
from bench.window import Window, measure
from bench.workloads import find


def measuring(seconds: float, seed: int, progress: Progress) -> Measure:
    """Measures windows of `seconds`; `seed` is that of the first repeat, and every further one has the next."""

    def measured(target: Target, case: Case) -> dict[str, Any]:
        own = length(case, seconds)
        return asdict(merged([_measured(target, case, own, seed + number, progress) for number in range(case.repeats)]))

    return measured


def _measured(target: Target, case: Case, seconds: float, seed: int, progress: Progress) -> Window:
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
                seed=seed,
                progress=lambda part: progress.show(case.key, part),
            )
        )
