"""How long steps take, learnt from those that have ended: when to queue the next one, and how long to sleep meanwhile."""

from __future__ import annotations

TICK = 1e-3
"""Seconds: what the event loop's timers count in. Shorter naps are none."""
WAKE_EARLY = 1.5e-3
"""Seconds before a step's expected end from which on it is watched: a nap may last a tick too long."""
SHORT = WAKE_EARLY + TICK
"""Seconds. The next step is queued at once behind a shorter one."""
QUEUE_FROM = 0.85
"""Share of a long step after which the next one is queued: early enough to leave no gap, late enough that requests which arrive
while it runs still join the next one."""
LATE = 0.15
"""Share of its time by which a step may be late and is still watched: batch mates and contexts make one longer than the next, and
a nap begun just before its end costs a tick or two, of which large steps had one in twenty on average."""
PATIENCE = 0.05
"""A step that is later is looked at again after this share of the time that it has taken so far."""
MOST_NAP = 20e-3
"""Seconds after which a step is looked at again, whatever was expected of it."""
_WEIGHT = 0.2
"""Of the latest step in the average."""
_LEAP = 2.0
"""A step counts as at most so many times what was expected: the first ones of a size may compile or load kernels."""


class Pace:
    """Expected seconds of a step by its number of rows, in powers of two."""

    def __init__(self) -> None:
        self._expected: dict[int, float] = {}

    def expected(self, rows: int) -> float:
        """Seconds; 0 while no step of about that size has ended."""
        return self._expected.get(rows.bit_length(), 0.0)

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. A shorter one than expected is believed at once: what has happened can be slept
        through too long, but not watched too early."""
        size = rows.bit_length()
        known = self._expected.get(size)
        if known is None or seconds < known:
            self._expected[size] = seconds
        else:
            self._expected[size] = known + _WEIGHT * (min(seconds, _LEAP * known) - known)

    def queue_from(self, rows: int) -> float:
        """How long after the start of a running step the next one should be queued."""
        expected = self.expected(rows)
        return 0.0 if expected < SHORT else QUEUE_FROM * expected - WAKE_EARLY

    def nap(self, rows: int, elapsed: float) -> float:
        """How long the loop may sleep while a step runs that began so long ago; 0 = it should watch."""
        expected = self.expected(rows)
        if elapsed < expected:
            nap = expected - elapsed - WAKE_EARLY
        else:
            nap = PATIENCE * elapsed if elapsed > (1 + LATE) * expected else 0.0
        return min(nap, MOST_NAP) if nap >= TICK else 0.0
