"""A coarse timer behind every sleep: a wake that never comes must not strand a message."""

from __future__ import annotations

import asyncio
import math
import select
from collections.abc import Callable

PERIOD = 0.25  # seconds
GRACE = 0.05  # seconds


class RescueTimer:
    """Calls `rescue` when `overdue` says twice in a row, GRACE apart, that a sleeper missed its wake.

    One look is not enough: a wake that is merely late on a busy host, or sits unread in the eventfd, is not lost.
    Ticks lie on multiples of PERIOD of the loop's clock, so that all rings of a loop are looked at in one wake-up.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, event: int, overdue: Callable[[], bool], rescue: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._event = event
        self._overdue = overdue
        self._rescue = rescue
        self._handle: asyncio.TimerHandle | None = None
        self._wakes = 0
        self._poll = select.poll()
        self._poll.register(event, select.POLLIN)

    def start(self) -> None:
        """Ticks until stop()."""
        if self._handle is None:
            self._next_tick()

    def stop(self) -> None:
        """No tick comes after this."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def woken(self) -> None:
        """The sleeper was woken in the regular way."""
        self._wakes += 1

    def _next_tick(self) -> None:
        when = (math.floor(self._loop.time() / PERIOD) + 1) * PERIOD
        self._handle = self._loop.call_at(when, self._tick)

    def _missed(self) -> bool:
        return self._overdue() and not self._poll.poll(0)

    def _tick(self) -> None:
        if self._missed():
            self._handle = self._loop.call_later(GRACE, self._second_look, self._wakes)
        else:
            self._next_tick()

    def _second_look(self, wakes: int) -> None:
        self._next_tick()
        if wakes == self._wakes and self._missed():
            self._rescue()
