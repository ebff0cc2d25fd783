"""The writing end on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os

from ipc.errors import RingClosedError, RingPoisonedError
from ipc.layout import ProducerCounter
from ipc.outbox import Outbox
from ipc.rescue import RescueTimer


class RingWriter:
    """Flushes an outbox's spill whenever the consumer has made room. Senders go on using the outbox."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        event = outbox.producer.space_event
        if event is None:
            raise ValueError(f"ring {outbox.producer.name}: the producer was made without a space event")
        self._loop = loop
        self._outbox = outbox
        self._event = event
        self._running = False
        self._rescue = RescueTimer(loop, event, self._overdue, self._count_rescue)

    def start(self) -> None:
        """Flushes until aclose()."""
        if not self._running:
            self._running = True
            self._loop.add_reader(self._event, self._on_event)
            self._rescue.start()

    async def aclose(self) -> None:
        """Stops flushing; what is in the spill stays there. The outbox stays the caller's."""
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._loop.remove_reader(self._event)
            self._rescue.stop()

    def _on_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._rescue.woken()
        self._outbox.producer.count(ProducerCounter.SPACE_WAKES)
        self._flush()

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except (RingClosedError, RingPoisonedError):
            # The next send raises the same to the sender, who knows what the messages were.
            self._stop()

    def _overdue(self) -> bool:
        return self._outbox.overdue

    def _count_rescue(self) -> None:
        self._outbox.producer.count(ProducerCounter.SPACE_RESCUES)
        self._flush()
