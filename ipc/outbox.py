"""A producer with a bounded spill behind it, so that a sender never waits and never loses a message silently."""

from __future__ import annotations

from collections import deque
from itertools import groupby, islice
from operator import itemgetter

from ipc.layout import RECORD_HEADER, ProducerCounter, aligned
from ipc.ring import PushResult, RingProducer

_TOGETHER = 256
"""Most messages that one store publishes."""
_kind = itemgetter(1)
# Python 3.11 takes ten times as long for a member of an enumeration as for a global name.
_FULL = PushResult.FULL
_SPILL_RECORDS, _SPILL_BYTES = ProducerCounter.SPILL_RECORDS, ProducerCounter.SPILL_BYTES


class Outbox:
    """What the daemon's processes send through. Messages leave in the order of `send`, whether spilled or not.

    Spilled messages leave on a later `send`, or on `flush`, which the owner calls when the producer's space event
    fires (RingWriter does that on an event loop).
    """

    def __init__(self, producer: RingProducer, *, spill_records: int = 4096, spill_bytes: int = 8 << 20) -> None:
        self.producer = producer
        self._spill: deque[tuple[bytes, int]] = deque()
        self._bytes = 0
        self._gathering = False
        self._most_gathered = self._gathered = 0
        self._max_records = spill_records
        self._max_bytes = spill_bytes
        self._max_message = producer.segment.spec.max_message
        # A producer before this one may have died with messages in its spill.
        self._show_depth()

    def send(self, payload: bytes, kind: int) -> bool:
        """Takes one message for delivery. False: ring and spill are full, the message was not taken.

        Raises MessageTooLargeError, RingClosedError, RingPoisonedError.
        """
        if len(payload) > self._max_message:
            # The push refuses what could never leave the spill, and says why.
            self.producer.try_push(payload, kind)
        if self._gathering and not self._full(payload):
            self._keep(payload, kind)
            self._gathered += 1
            if self._gathered == self._most_gathered:
                self._gathered = 0
                self.flush()
            return True
        may_push = not self._spill or self._push_spilled()
        if may_push and self.producer.try_push(payload, kind) is not _FULL:
            return True
        if self._full(payload):
            self.producer.count(ProducerCounter.REJECTED)
            return False
        self._keep(payload, kind)
        self._show_depth()
        if len(self._spill) == 1 and not self._gathering:
            self.flush()
        return True

    def gather(self, most: int = 0) -> None:
        """From now on keep messages in the spill, until `release`, or until there are `most` of them, which leave then: a sleeping
        consumer finds them all when it wakes. 0: no number is enough. Gauges do not show them meanwhile."""
        self._gathering, self._most_gathered, self._gathered = True, most, 0

    def release(self) -> None:
        """Send what was gathered, at once."""
        self._gathering = False
        if self._spill:
            self.flush()
            self._show_depth()

    def flush(self) -> int:
        """Moves what fits from the spill to the ring; if some stays, the space event will fire. Returns the number."""
        before = len(self._spill)
        while not self._push_spilled() and not self.producer.prepare_wait(len(self._spill[0][0])):
            pass
        return before - len(self._spill)

    @property
    def depth(self) -> tuple[int, int]:
        """Messages and payload bytes in the spill."""
        return len(self._spill), self._bytes

    @property
    def overdue(self) -> bool:
        """Something is spilled although the consumer must have announced room for it by now."""
        if not self._spill:
            return False
        capacity = self.producer.segment.spec.capacity
        # An empty ring takes every message.
        return self.producer.free_bytes >= min(max(capacity // 4, self._enough()), capacity)

    def _keep(self, payload: bytes, kind: int) -> None:
        self._spill.append((payload, kind))
        self._bytes += len(payload)

    def _full(self, payload: bytes) -> bool:
        return len(self._spill) >= self._max_records or self._bytes + len(payload) > self._max_bytes

    def _enough(self) -> int:
        """Free bytes with which the first spilled message certainly fits: twice its size covers the padding at the buffer's end."""
        return 2 * (RECORD_HEADER + aligned(len(self._spill[0][0])))

    def _push_spilled(self) -> bool:
        """True once the spill is empty."""
        moved = False
        while self._spill:
            # Published by one store: a consumer that wakes on this core at once would find the first one alone. But a ring that
            # may be full is asked with the first one: many would be collected for nothing by every send.
            most = _TOGETHER if self.producer.free_bytes >= self._enough() else 1
            kind, alike = next(groupby(islice(self._spill, most), key=_kind))
            batch = [payload for payload, _ in alike]
            pushed = self.producer.try_push_many(batch, kind)
            for payload in batch[:pushed]:
                self._spill.popleft()
                self._bytes -= len(payload)
            moved = moved or pushed > 0
            if pushed < len(batch):
                break
        if moved:
            self._show_depth()
        return not self._spill

    def _show_depth(self) -> None:
        self.producer.gauge(_SPILL_RECORDS, len(self._spill))
        self.producer.gauge(_SPILL_BYTES, self._bytes)
