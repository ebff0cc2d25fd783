"""The events of one recording of a decode loop: the latest ones, kept until they are read."""

from __future__ import annotations

from collections import deque

import msgspec

from trouterd.tracing.events import Event, Mark, Queues, Work
from trouterd.worker.scheduler import Scheduler
from trouterd.worker.stats import Stats

CAPACITY = 1 << 16
"""Events that are kept, the latest ones: some 10 MB."""


class EventLog:
    """What is added, what the loop works on, and changes of queues and totals that it finds when it is asked to look.

    Args:
        scheduler: of the worker, like stats; both are only read.
        stats: counts that marks are taken from.
        capacity: events that are kept.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats, capacity: int = CAPACITY) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._events: deque[Event] = deque(maxlen=capacity)
        self._added = 0
        self._taken = 0
        self._work = ""
        self._work_since = 0.0
        self._queues = (-1, -1, -1)
        self._counts = self._totals()

    def __len__(self) -> int:
        """Events that have not been taken."""
        return len(self._events)

    @property
    def dropped(self) -> int:
        """Events that there was no room for, the oldest ones."""
        return self._added - self._taken - len(self._events)

    def add(self, event: Event) -> None:
        """One more."""
        self._added += 1
        self._events.append(event)

    def begin_work(self, name: str, now: float) -> None:
        """The loop does something from now on, if it is not at work already."""
        if not self._work:
            self._work, self._work_since = name, now

    def end_work(self, now: float) -> None:
        """It has done that."""
        if self._work:
            self.add(Work(self._work, self._work_since, now))
            self._work = ""

    def note_queues(self, now: float) -> None:
        """Where the requests are, if that has changed."""
        scheduler = self._scheduler
        queues = (len(scheduler.running), len(scheduler.away), len(scheduler.waiting))
        if queues != self._queues:
            self._queues = queues
            self.add(Queues(now, *queues))

    def note_totals(self, now: float) -> None:
        """Requests that were admitted, finished or preempted since the last look."""
        counts = self._totals()
        if counts != self._counts:
            for name, before, after in zip(("admitted", "finished", "preempted"), self._counts, counts, strict=True):
                if after > before:
                    self.add(Mark(name, now, after - before))
            self._counts = counts

    def take(self, most: int) -> bytes:
        """The oldest events that have not been taken, msgpack; empty list: there are no more."""
        events = [self._events.popleft() for _ in range(min(most, len(self._events)))]
        self._taken += len(events)
        return msgspec.msgpack.encode(events)

    def _totals(self) -> tuple[int, int, int]:
        stats = self._stats
        return stats.submitted, stats.finished.total(), self._scheduler.preemptions
