"""The two ends of a ring as the daemon uses them: attach rules and errors over either core."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import NoReturn, Self

from ipc import layout
from ipc.core import CLOSED, TOO_LARGE, Buffer, Core, Handler, load_core
from ipc.errors import MessageTooLargeError, RingClosedError, RingPoisonedError
from ipc.layout import FAULT_TEXT, ConsumerCounter, Fault, ProducerCounter, State, ring_name
from ipc.role import Role, RoleLock
from ipc.segment import SharedSegment


class PushResult(enum.IntEnum):
    """What became of a push."""

    FULL = 0
    """Nothing was written."""
    PUBLISHED = 1
    PUBLISHED_WOKE = 2
    """Published, and the consumer was asleep and has been woken."""


_RESULTS = (PushResult.FULL, PushResult.PUBLISHED, PushResult.PUBLISHED_WOKE)


class _Endpoint:
    """Holds one role of a segment from attach to close."""

    _PID: int
    _EPOCH: int
    _FENCE: int
    _COUNTERS: int
    _ROLE: Role

    def __init__(self, segment: SharedSegment, core: Core) -> None:
        self.segment = segment
        self._lock = RoleLock(segment, self._ROLE)
        # The fence mode is in place before anything is pushed, and attach wakes the other end afterwards: a sleeper
        # that went to sleep under the old mode looks again under the new one.
        segment.halves[self._FENCE // 4] = core.FENCE
        segment.halves[self._PID // 4] = os.getpid()
        segment.words[self._EPOCH // 8] += 1

    @property
    def state(self) -> State:
        """What is allowed on the ring."""
        return self.segment.state

    def stats(self) -> dict[str, int]:
        """Every counter and gauge of the ring."""
        return self.segment.stats()

    def _add(self, counter: int, amount: int = 1) -> None:
        self.segment.words[self._COUNTERS // 8 + counter] += amount

    def _set(self, counter: int, value: int) -> None:
        self.segment.words[self._COUNTERS // 8 + counter] = value

    def _broken_cursors(self, error: ValueError) -> NoReturn:
        self._lock.release()
        raise RingPoisonedError(f"ring {self.name}: {error}; it must be replaced") from error

    @property
    def name(self) -> str:
        """`source->destination`."""
        return ring_name(self.segment.spec.ring_id)


class RingProducer(_Endpoint):
    """The writing end. `data_event` wakes the consumer; `space_event` is how the consumer wakes this end.

    Both are eventfds that the caller owns. RoleTakenError if a living process holds this end.
    """

    _PID = layout.OFF_PRODUCER_PID
    _EPOCH = layout.OFF_PRODUCER_EPOCH
    _FENCE = layout.OFF_PRODUCER_FENCE
    _COUNTERS = layout.OFF_PRODUCER_COUNTERS
    _ROLE = Role.PRODUCER

    def __init__(
        self, segment: SharedSegment, data_event: int, space_event: int | None = None, *, core: Core | None = None
    ) -> None:
        core = core or load_core()
        super().__init__(segment, core)
        self.space_event = space_event
        self._data_event = data_event
        try:
            self._core = core.Producer(segment.buffer, data_event)
        except ValueError as error:
            self._broken_cursors(error)
        self._push = self._core.push
        # Whatever an earlier producer published and could not announce any more is announced now.
        self.kick()

    def try_push(self, payload: Buffer, kind: int) -> PushResult:
        """Publishes one message, or nothing if it does not fit now. Never blocks.

        Raises MessageTooLargeError, RingClosedError, RingPoisonedError.
        """
        result = self._push(payload, kind)
        return _RESULTS[result] if result >= 0 else self._refuse(result, payload)

    def try_push_many(self, payloads: Sequence[Buffer], kind: int) -> int:
        """Publishes as many messages from the front as fit, with one store and one wake; returns their number.

        Raises as try_push does, but only for the first message: a later one ends the batch before it.
        """
        result = self._core.push_many(payloads, kind)
        return result if result >= 0 else self._refuse(result, payloads[0])

    def kick(self) -> None:
        """Wakes the consumer without any condition."""
        os.eventfd_write(self._data_event, 1)
        self._add(ProducerCounter.KICKS)

    def prepare_wait(self, length: int) -> bool:
        """Announces that this end waits for room for a message of `length` bytes.

        True: there is none, the space event will come. False: there is room, push again.
        """
        return self._core.prepare_wait(length)

    def cancel_wait(self) -> None:
        """Takes the announcement back."""
        self._core.cancel_wait()

    @property
    def free_bytes(self) -> int:
        """Free bytes in the ring, record headers included."""
        return self._core.free_bytes

    def count(self, counter: ProducerCounter, amount: int = 1) -> None:
        """Adds to one of this end's counters; for the outbox and the glue to an event loop."""
        self._add(counter, amount)

    def gauge(self, counter: ProducerCounter, value: int) -> None:
        """Sets one of this end's gauges."""
        self._set(counter, value)

    def close(self) -> None:
        """Gives the end up; the segment stays the caller's."""
        self._core.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse(self, code: int, payload: Buffer) -> NoReturn:
        if code == TOO_LARGE:
            raise MessageTooLargeError(
                f"ring {self.name}: a message of {memoryview(payload).nbytes} bytes can never fit, "
                f"the limit is {self.segment.spec.max_message}: create the ring with a larger capacity"
            )
        if code == CLOSED:
            raise RingClosedError(f"ring {self.name} is closed")
        raise RingPoisonedError(f"ring {self.name} is poisoned; it must be replaced")


class RingConsumer(_Endpoint):
    """The reading end. `data_event` is how the producer wakes this end; `space_event` wakes the producer.

    Delivery is at least once: a message is released after its handler returned, a batch at a time, so a consumer that
    is killed leaves up to one batch to be read again. RoleTakenError if a living process holds this end.
    """

    _PID = layout.OFF_CONSUMER_PID
    _EPOCH = layout.OFF_CONSUMER_EPOCH
    _FENCE = layout.OFF_CONSUMER_FENCE
    _COUNTERS = layout.OFF_CONSUMER_COUNTERS
    _ROLE = Role.CONSUMER

    def __init__(
        self, segment: SharedSegment, data_event: int, space_event: int | None = None, *, core: Core | None = None
    ) -> None:
        core = core or load_core()
        super().__init__(segment, core)
        self.data_event = data_event
        try:
            self._core = core.Consumer(segment.buffer, -1 if space_event is None else space_event)
        except ValueError as error:
            self._broken_cursors(error)
        # A producer may wait for room that only a consumer, now gone, could have announced.
        if space_event is not None:
            os.eventfd_write(space_event, 1)

    def poll(self, handler: Handler, *, max_records: int = 64, max_bytes: int = 1 << 18) -> int:
        """Hands up to `max_records` messages, or about `max_bytes`, to `handler(kind, view)`; returns their number.

        A view is valid only inside its handler; BufferError if a handler keeps one. A handler that raises ends the
        batch, and its message counts as handled. Raises RingPoisonedError for a record that cannot be right.
        """
        result = self._core.poll(handler, max_records, max_bytes)
        if result < 0:
            raise RingPoisonedError(f"ring {self.name}: {FAULT_TEXT[Fault(-result)]}; it must be replaced")
        return result

    def attach_policy(self, on_stale: Handler) -> int:
        """Hands everything that was published before this call to `on_stale`; returns the number of messages.

        For a restarted consumer: those messages were meant for its predecessor and are to be refused, never dropped.
        """
        end = self._core.position + self._core.pending
        stale = 0
        while self._core.position < end:
            stale += self.poll(on_stale, max_records=1)
        self._add(ConsumerCounter.STALE_RECORDS, stale)
        return stale

    def prepare_wait(self) -> bool:
        """Announces a sleep. True: the ring is empty, the data event will come. False: poll again."""
        return self._core.prepare_wait()

    def cancel_wait(self) -> None:
        """Takes the announcement back."""
        self._core.cancel_wait()

    def spin(self, microseconds: int) -> bool:
        """Looks for data for up to `microseconds` without sleeping; True if there is some."""
        return self._core.spin(microseconds)

    @property
    def pending(self) -> int:
        """Bytes published and not yet released."""
        return self._core.pending

    @property
    def position(self) -> int:
        """Bytes released since the ring was created."""
        return self._core.position

    def count(self, counter: ConsumerCounter, amount: int = 1) -> None:
        """Adds to one of this end's counters; for the glue to an event loop."""
        self._add(counter, amount)

    def close(self) -> None:
        """Gives the end up; the segment stays the caller's."""
        self._core.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
