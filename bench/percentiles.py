"""How durations are summed up."""

from __future__ import annotations

import math
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

    @classmethod
    def of_buckets(cls, buckets: Sequence[tuple[float, float]], total: float) -> Self | None:
        """Of a histogram: what lies within a bucket is taken to be spread evenly over it.

        Args:
            buckets: upper bound in seconds and how many are not above it, rising; the last bound may be infinite.
            total: sum of all, seconds.

        Returns:
            None of nothing.
        """
        count = round(buckets[-1][1]) if buckets else 0
        if not count:
            return None
        return cls(
            mean=1e3 * total / count,
            p50=_quantile(buckets, 0.5),
            p95=_quantile(buckets, 0.95) if count >= _MANY else None,
            p99=_quantile(buckets, 0.99) if count >= _VERY_MANY else None,
            count=count,
        )


def _quantile(buckets: Sequence[tuple[float, float]], part: float) -> float:
    """Milliseconds; beyond the last finite bound, that one."""
    wanted, low, below = part * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            return 1e3 * (low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below))
        low, below = bound, count
    return 1e3 * low
