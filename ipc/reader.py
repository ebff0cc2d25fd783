"""The reading end on an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ipc.core import Handler
from ipc.errors import RingPoisonedError
from ipc.layout import ConsumerCounter
from ipc.rescue import RescueTimer
from ipc.ring import RingConsumer

_BATCH = 64  # messages between two stores of head


class RingReader:
    """Hands a consumer's messages to `handler` inside the loop's own thread, and sleeps on the data event in between.

    `spin_us` looks for more data before it sleeps and blocks the loop for that long: 20 to 50 pays where a round trip is
    waited for; it may be set at any time. `fairness_bytes` bounds one turn, after which the
    loop's other callbacks run first. A poisoned ring stops the reader and goes to `on_poisoned`; an exception of the
    handler goes to the loop's exception handler and reading goes on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        consumer: RingConsumer,
        handler: Handler,
        *,
        spin_us: int = 0,
        fairness_bytes: int = 1 << 18,
        on_poisoned: Callable[[RingPoisonedError], None] | None = None,
    ) -> None:
        self.spin_us = spin_us
        self._loop = loop
        self._consumer = consumer
        self._handler = handler
        self._fairness_bytes = fairness_bytes
        self._on_poisoned = on_poisoned
        self._running = False
        self._asleep = False
        self._turn: asyncio.Handle | None = None
        self._rescue = RescueTimer(loop, consumer.data_event, self._overdue, self._count_rescue)

    def start(self) -> None:
        """Reads what is there on the loop's next turn, and goes on until aclose()."""
        if self._running:
            return
        self._running = True
        self._loop.add_reader(self._consumer.data_event, self._on_event)
        self._rescue.start()
        self._schedule()

    def catch_up(self) -> None:
        """Reads at once what is in the ring now; for a producer that is dead."""
        consumer = self._consumer
        end = consumer.position + consumer.pending
        before = -1
        # A message that the producer left unfinished never gets shorter.
        while self._running and before < consumer.position < end:
            before = consumer.position
            self._take_turn()

    async def aclose(self) -> None:
        """Stops reading; what is in the ring stays there. The consumer stays the caller's."""
        self._stop()

    def _stop(self) -> None:
        if not self._running:
            return
        self._running = False
        self._loop.remove_reader(self._consumer.data_event)
        self._rescue.stop()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._consumer.cancel_wait()

    def _schedule(self) -> None:
        if self._running and self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def _on_event(self) -> None:
        try:  # noqa: SIM105 - contextlib.suppress costs more than the read itself
            os.eventfd_read(self._consumer.data_event)
        except BlockingIOError:
            pass
        self._rescue.woken()
        self._consumer.count(ConsumerCounter.WAKES_RECEIVED)
        if not self._consumer.pending:
            self._consumer.count(ConsumerCounter.EMPTY_WAKES)
        if self._turn is None:
            self._take_turn()

    def _take_turn(self) -> None:
        self._turn = None
        self._asleep = False
        done = False
        try:
            done = self._drain()
        except RingPoisonedError as error:
            self._stop()
            self._report(error)
        finally:
            # Also after an error of the handler, which the loop reports: the messages behind it get no new wake.
            if not done:
                self._schedule()

    def _drain(self) -> bool:
        """Reads until the ring is empty and a sleep is announced (True), or the turn's budget is spent (False)."""
        consumer = self._consumer
        end = consumer.position + self._fairness_bytes
        while self._running:
            full_batch = consumer.poll(self._handler, max_records=_BATCH, max_bytes=self._fairness_bytes) == _BATCH
            if consumer.position >= end:
                return False
            if full_batch:
                continue
            if self.spin_us and consumer.spin(self.spin_us):
                consumer.count(ConsumerCounter.SPIN_HITS)
            elif consumer.prepare_wait():
                self._asleep = True
                return True
        return True

    def _report(self, error: RingPoisonedError) -> None:
        if self._on_poisoned is not None:
            self._on_poisoned(error)
        else:
            self._loop.call_exception_handler({"message": str(error), "exception": error})

    def _overdue(self) -> bool:
        return self._asleep and self._consumer.pending > 0

    def _count_rescue(self) -> None:
        self._consumer.count(ConsumerCounter.RESCUES)
        self._take_turn()
