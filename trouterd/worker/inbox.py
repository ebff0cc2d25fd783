"""What has arrived for a decode loop between two of its steps, and its sleep until something does."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from trouterd.worker.events import Event
from trouterd.worker.stepper import NEVER


class Inbox:
    """Messages and commands in order of arrival; filled by the process's event loop, emptied by the decode loop."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._woken = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: Event) -> None:
        """Something has arrived."""
        self._events.append(event)
        self._woken.set()

    def wake(self) -> None:
        """End the loop's sleep, the next one if it is awake."""
        self._woken.set()

    def take(self) -> Iterator[Event]:
        """Everything that is here, what arrives meanwhile included."""
        self._woken.clear()
        while self._events:
            yield self._events.popleft()

    async def wait(self, until: float) -> None:
        """Sleep until something has arrived since the last look, at most until that time.monotonic()."""
        if until == NEVER:
            await self._woken.wait()
        elif not self._woken.is_set():
            await self.sleep(max(until - time.monotonic(), 0.0))

    async def watch(self, until: float, look: Callable[[], bool]) -> bool:
        """Stay awake until something has arrived since the last look, or `look` finds something, at most until that
        time.monotonic(); whether one of both has happened. The loop's other callbacks run meanwhile."""
        while not self._woken.is_set() and not look():
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(0)
        return True

    async def sleep(self, seconds: float) -> None:
        """Sleep, but not through an arrival."""
        self._woken.clear()
        alarm = asyncio.get_running_loop().call_later(seconds, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            alarm.cancel()
