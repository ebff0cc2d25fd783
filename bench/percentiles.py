"""How durations are summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of durations, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        """None of nothing."""
        if not seconds:
            return None
        values = 1e3 * np.array(seconds)
        return cls(float(values.mean()), *np.percentile(values, (50, 95, 99)).tolist())
