"""What a device does within a step: time per kernel, and the time in which no kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel."""

    name: str
    per_step: float
    us_per_step: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Of a few steps in a row; under the profiler they are somewhat longer than otherwise."""

    steps: int
    span_us: float
    """Per step, from the start of the first kernel to the end of the last."""
    idle_us: float
    """Per step, with no kernel at work: launch gaps."""
    launches: float
    """Per step."""
    kernels: tuple[Kernel, ...]
    """By time, falling."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One kernel at work, us."""

    name: str
    start: float
    end: float


def profile_steps(run: Callable[[], None], steps: int) -> Profile | None:
    """Profile `run`, which makes this many steps on a CUDA device; None if the profiler sees no kernels here."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return summarise(events, steps) if events else None


def summarise(events: Iterable[Interval], steps: int) -> Profile:
    """The profile of what ran in this many steps, kernels that overlap counted once in the busy time."""
    ordered = sorted(events, key=lambda event: event.start)
    busy, reached = 0.0, ordered[0].start
    times: dict[str, list[float]] = {}
    for event in ordered:
        busy += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
        times.setdefault(event.name, []).append(event.end - event.start)
    span = reached - ordered[0].start
    kernels = [Kernel(name, len(each) / steps, sum(each) / steps) for name, each in times.items()]
    return Profile(
        steps=steps,
        span_us=span / steps,
        idle_us=(span - busy) / steps,
        launches=len(ordered) / steps,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.us_per_step)),
    )
