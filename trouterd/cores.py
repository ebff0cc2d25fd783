"""The cores that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of a container: microseconds of CPU, or "max", in so many microseconds."""


def available_cores() -> float:
    """Those that it may run on, or what its container's quota comes to if that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores
