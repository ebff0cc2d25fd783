"""For how long steps of two models ran at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trouterd.batching.network import Floats
from trouterd.batching.report import Step


def overlapped(steps: Sequence[Step], others: Sequence[Step]) -> Floats:
    """Seconds of each step during which the other model ran.

    Args:
        steps: of one model.
        others: of the other one, in order; they do not overlap each other.

    Returns:
        [len(steps)] seconds.
    """
    begin = np.array([step.begin for step in steps])
    end = begin + np.array([step.seconds for step in steps])
    if not others:
        return np.zeros(len(steps))
    edges = np.array([edge for step in others for edge in (step.begin, step.begin + step.seconds)])
    edges = np.maximum.accumulate(edges)
    busy = np.concatenate(([0.0], np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0))))
    return np.asarray(np.interp(end, edges, busy) - np.interp(begin, edges, busy))
