"""How durations are summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

_MANY, _VERY_MANY = 20, 100
"""How many durations a 95th, and a 99th percentile needs: with fewer it would be the longest one."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of durations, in milliseconds."""

    mean: float
    p50: float
    p95: float | None
    """None of fewer than 20."""
    p99: float | None
    """None of fewer than 100."""
    count: int = 0
    """How many there were; 0: not known."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        """None of nothing."""
        count = len(seconds)
        if not count:
            return None
        values = 1e3 * np.array(seconds)
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(
            mean=float(values.mean()),
            p50=p50,
            p95=p95 if count >= _MANY else None,
            p99=p99 if count >= _VERY_MANY else None,
            count=count,
        )
