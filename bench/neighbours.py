"""How busy other programs kept the host meanwhile: on a shared machine a measurement says little without it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """CPU time of all programs but this one and some others.

    Args:
        own: process ids that belong to the measurement, this one's aside.
    """

    def __init__(self, own: Sequence[int]) -> None:
        self._own = [os.getpid(), *own]
        self._begin = (0.0, 0.0)

    def start(self) -> None:
        """A span begins."""
        self._begin = time.monotonic(), self._seconds()

    def busy(self) -> float:
        """CPUs that others kept busy since then, in the mean; time that a hypervisor took away counts."""
        begin, before = self._begin
        return max(0.0, (self._seconds() - before) / (time.monotonic() - begin))

    def _seconds(self) -> float:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
        user, nice, system, _, _, interrupt, soft, steal = map(int, fields)
        total = user + nice + system + interrupt + soft + steal
        return (total - sum(map(ticks, self._own))) / _TICKS


def ticks(pid: int) -> int:
    """User and system time of a process and its ended children, in ticks of the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))
