"""What the steps of each model in a window were like, and for how long other models ran meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trouterd.batching.overlap import overlapped
from trouterd.batching.report import Step
from trouterd.worker.observer import LATEST


@dataclass(frozen=True, slots=True)
class Overlap:
    """Means over the steps of one model that fed no prompt."""

    steps: int
    batch: float
    """Requests, without those that had left in the step before, as in `Window.batch`."""
    step_ms: float
    overlap_ms: float
    """Of a step, during which other models ran, prompts included; with two of them at once it counts twice."""


def overlaps(steps: Mapping[str, Sequence[Step]], begin: float, end: float) -> dict[str, Overlap]:
    """By model; one without such a step is missing.

    Args:
        steps: of each model, in order, beyond both ends.
        begin: of the window, on the steps' clock: steps that began before do not count.
        end: of the window: nor do those that ended after it.
    """
    # What a worker has kept no more is missing of all models alike.
    begin = max([begin, *(own[0].begin for own in steps.values() if len(own) == LATEST)])
    found = {}
    for name, own in steps.items():
        inside = [step for step in own if step.requests and step.begin >= begin and step.begin + step.seconds <= end]
        if not inside:
            continue
        beside = sum(
            (overlapped(inside, other) for peer, other in steps.items() if peer != name), np.zeros(len(inside))
        )
        found[name] = Overlap(
            steps=len(inside),
            batch=float(np.mean([step.requests for step in inside])),
            step_ms=1e3 * float(np.mean([step.seconds for step in inside])),
            overlap_ms=1e3 * float(np.mean(beside)),
        )
    return found
