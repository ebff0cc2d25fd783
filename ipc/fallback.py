"""The ring core in pure Python, for x86-64 machines without a C compiler.

Every shared word is one item of a cast memoryview: CPython copies it with a single 8-byte move. `struct.pack_into` must
never be used here, it clears the field first and the other process can see that zero. x86-64 keeps stores in order and
loads in order, which is all that publishing needs; the one reordering that it allows, a store passing a later load,
matters only before a sleep and is closed there by membarrier, on behalf of both ends.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ipc import layout
from ipc.core import CLOSED, POISONED, TOO_LARGE, Buffer, Handler
from ipc.fence import choose_fences, require_x86_64
from ipc.layout import ALIGNMENT, EPOCH_MASK, FLAG_MORE, HEADER_BYTES, MAX_KIND, PADDING, RECORD_HEADER, Fault, State

require_x86_64()
_fast_fence, _sleep_fence, _by_membarrier = choose_fences()
FENCE = int(_by_membarrier)

_U32 = 0xFFFFFFFF
_TAIL = layout.OFF_TAIL // 8
_SENT_COUNT = layout.OFF_SENT_COUNT // 8
_HEAD = layout.OFF_HEAD // 8
_RECV_COUNT = layout.OFF_RECV_COUNT // 8
_CONSUMER_WAITING = layout.OFF_CONSUMER_WAITING // 8
_PRODUCER_WAITING = layout.OFF_PRODUCER_WAITING // 8
_FULL_EVENTS = layout.OFF_PRODUCER_COUNTERS // 8 + layout.ProducerCounter.FULL_EVENTS
_WAKES_SENT = layout.OFF_PRODUCER_COUNTERS // 8 + layout.ProducerCounter.WAKES_SENT
_BAD_RECORDS = layout.OFF_CONSUMER_COUNTERS // 8 + layout.ConsumerCounter.BAD_RECORDS
_BATCHES = layout.OFF_CONSUMER_COUNTERS // 8 + layout.ConsumerCounter.BATCHES
_SPACE_WAKES_SENT = layout.OFF_CONSUMER_COUNTERS // 8 + layout.ConsumerCounter.SPACE_WAKES_SENT
_STATE = layout.OFF_STATE // 4


class Words(Protocol):
    """Shared integers; each item is read and written by one move."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Slots(NamedTuple):
    """The same memory three times: as 8-byte words, as 4-byte halves, and as bytes for payloads."""

    words: Words
    halves: Words
    data: memoryview


def open_slots(memory: memoryview) -> Slots:
    """Views of a mapped segment."""
    return Slots(memory.cast("Q"), memory.cast("I"), memory.cast("B"))


def _check(length: int, seq: int, tag: int, payload: Buffer) -> int:
    fields = length | seq << 32 | tag << 64
    return zlib.crc32(payload, zlib.crc32(fields.to_bytes(12, "little")))


class _End:
    """What both ends share: the memory, its sizes and the rules for cursors."""

    def __init__(self, memory: memoryview) -> None:
        self._views = open_slots(memory)
        self._words, self._halves, self._data = self._views
        self._capacity = self._words[layout.OFF_CAPACITY // 8]
        self._max_record = self._halves[layout.OFF_MAX_RECORD // 4]
        self._max_message = self._capacity - RECORD_HEADER * (self._capacity // self._max_record + 2)
        self._checksum = bool(self._halves[layout.OFF_FEATURES // 4] & layout.FEATURE_CHECKSUM)
        if not self._possible(self._words[_TAIL], self._words[_HEAD]):
            self._poison()
            raise ValueError("the cursors of the ring are impossible")

    def _possible(self, tail: int, head: int) -> bool:
        return 0 <= tail - head <= self._capacity and (tail | head) % ALIGNMENT == 0

    def _poison(self) -> None:
        self._halves[_STATE] = State.POISONED

    def _count(self, counter: int) -> None:
        self._words[counter] += 1

    def _contiguous(self, position: int) -> int:
        return self._capacity - (position & (self._capacity - 1))

    def _wake(self, flag: int, event: int) -> bool:
        """Takes the announcement back, then signals: in the other order a new announcement could be wiped out."""
        if not self._words[flag]:
            return False
        self._words[flag] = 0
        if event >= 0:
            os.eventfd_write(event, 1)
        return True

    def close(self) -> None:
        """Lets go of the memory."""
        for view in self._views:
            if isinstance(view, memoryview):
                view.release()


class Producer(_End):
    """The writing end."""

    def __init__(self, memory: memoryview, data_event: int) -> None:
        super().__init__(memory)
        self._event = data_event
        self._tail = self._next = self._words[_TAIL]
        self._head = self._words[_HEAD]
        self._sent = self._words[_SENT_COUNT]
        self._epoch = self._words[layout.OFF_PRODUCER_EPOCH // 8] & EPOCH_MASK
        self._seq = 0

    def push(self, payload: Buffer, kind: int, /) -> int:
        """See ProducerCore."""
        result = self._append(payload, kind)
        return self._publish() if result == 1 else result

    def push_many(self, payloads: Sequence[Buffer], kind: int, /) -> int:
        """See ProducerCore."""
        done, result = 0, 1
        try:
            for payload in payloads:
                result = self._append(payload, kind)
                if result != 1:
                    break
                done += 1
        finally:
            if done:
                self._publish()
        return result if not done and result < 0 else done

    def prepare_wait(self, length: int, /) -> bool:
        """See ProducerCore."""
        self._words[_PRODUCER_WAITING] = 1
        _sleep_fence()
        room = self._look_at_head()
        if 0 <= room < self._need(length):
            return True
        self.cancel_wait()
        return False

    def cancel_wait(self) -> None:
        """See ProducerCore."""
        self._words[_PRODUCER_WAITING] = 0

    @property
    def free_bytes(self) -> int:
        """See ProducerCore."""
        return max(0, self._look_at_head())

    def _look_at_head(self) -> int:
        """Free bytes; -1 and poisoned if the consumer's cursor is impossible."""
        head = self._words[_HEAD]
        if head < self._head or not self._possible(self._tail, head):
            self._poison()
            return -1
        self._head = head
        return self._capacity - (self._next - head)

    def _fragment(self, position: int, left: int) -> int:
        """Payload bytes of the next fragment: fragments end where the buffer ends, so they never need padding."""
        return min(left, self._max_record, self._contiguous(position) - RECORD_HEADER)

    def _need(self, length: int) -> int:
        contiguous = self._contiguous(self._next)
        need = RECORD_HEADER + layout.aligned(length)
        if length <= self._max_record:
            return need if need <= contiguous else need + contiguous
        position = self._next
        while length:
            size = self._fragment(position, length)
            position += RECORD_HEADER + layout.aligned(size)
            length -= size
        return position - self._next

    def _append(self, payload: Buffer, kind: int) -> int:
        """Writes a whole message behind the unpublished ones: 1, 0 if it does not fit, or a negative code."""
        if not 0 <= kind <= MAX_KIND:
            raise ValueError(f"kind must be between 0 and {MAX_KIND}, not {kind}")
        state = self._halves[_STATE]
        if state >= State.CLOSED:
            return CLOSED if state == State.CLOSED else POISONED
        view = memoryview(payload).cast("B")
        length = len(view)
        if length > self._max_message:
            return TOO_LARGE
        need = self._need(length)
        if self._capacity - (self._next - self._head) < need:
            room = self._look_at_head()
            if room < 0:
                return POISONED
            if room < need:
                self._count(_FULL_EVENTS)
                return 0
        if length > self._max_record:
            while view:
                size = self._fragment(self._next, len(view))
                self._put(size, view[:size], kind, FLAG_MORE if size < len(view) else 0)
                view = view[size:]
        else:
            contiguous = self._contiguous(self._next)
            if need > contiguous:
                self._put(PADDING | contiguous - RECORD_HEADER, b"", 0, 0)
            self._put(length, view, kind, 0)
        self._sent += 1
        return 1

    def _put(self, length: int, payload: Buffer, kind: int, flags: int) -> None:
        at = HEADER_BYTES + (self._next & (self._capacity - 1))
        tag = kind | (flags | self._epoch) << 16
        half = at // 4
        self._halves[half] = length
        self._halves[half + 1] = self._seq
        self._halves[half + 2] = _check(length, self._seq, tag, payload) if self._checksum else 0
        self._halves[half + 3] = tag
        if payload:
            self._data[at + RECORD_HEADER : at + RECORD_HEADER + len(payload)] = payload
        if not length & PADDING:
            self._seq = (self._seq + 1) & _U32
        self._next += RECORD_HEADER + layout.aligned(length & ~PADDING)

    def _publish(self) -> int:
        self._tail = self._next
        self._words[_TAIL] = self._tail
        _fast_fence()
        self._words[_SENT_COUNT] = self._sent
        if not self._wake(_CONSUMER_WAITING, self._event):
            return 1
        self._count(_WAKES_SENT)
        return 2


class Consumer(_End):
    """The reading end."""

    def __init__(self, memory: memoryview, space_event: int) -> None:
        super().__init__(memory)
        self._event = space_event
        self._head = self._next = self._words[_HEAD]
        self._tail = self._words[_TAIL]
        self._received = self._words[_RECV_COUNT]
        self._seq = 0
        self._epoch: int | None = None
        self._fault: Fault | None = None
        self._busy = False

    def poll(self, handler: Handler, max_records: int, max_bytes: int, /) -> int:
        """See ConsumerCore."""
        if self._busy:
            raise RuntimeError("the consumer is in use: a handler must not read its own ring")
        self._busy = True
        done = 0
        try:
            while done < max_records and self._next - self._head < max_bytes and self._handle(handler):
                done += 1
        finally:
            if self._fault is None:
                self._release()
            self._busy = False
        return -self._fault if done == 0 and self._fault else done

    def prepare_wait(self) -> bool:
        """See ConsumerCore."""
        self._words[_CONSUMER_WAITING] = 1
        _sleep_fence()
        if self._fault is None and not self._look_at_tail() and self._fault is None:
            return True
        self.cancel_wait()
        return False

    def cancel_wait(self) -> None:
        """See ConsumerCore."""
        self._words[_CONSUMER_WAITING] = 0

    def spin(self, microseconds: int, /) -> bool:
        """See ConsumerCore."""
        end = time.perf_counter_ns() + microseconds * 1000
        while not (self._fault or self._look_at_tail() or self._fault):
            if time.perf_counter_ns() >= end:
                return False
        return True

    @property
    def pending(self) -> int:
        """See ConsumerCore."""
        return self._words[_TAIL] - self._head

    @property
    def position(self) -> int:
        """See ConsumerCore."""
        return self._head

    def _give_up(self, fault: Fault) -> None:
        """Nothing more is read from this ring."""
        self._fault = fault
        if fault is not Fault.STATE:
            self._count(_BAD_RECORDS)
            self._poison()

    def _look_at_tail(self) -> bool:
        """True if there is something to read; a fault is left in `_fault`."""
        if self._halves[_STATE] == State.POISONED:
            self._give_up(Fault.STATE)
            return False
        tail = self._words[_TAIL]
        if tail < self._tail or not self._possible(tail, self._head):
            self._give_up(Fault.CURSOR)
            return False
        self._tail = tail
        return self._next != tail

    def _record(self) -> tuple[int, int, memoryview] | None:
        """Kind, flags and payload of the next record; None if there is none or it is bad."""
        while self._next != self._tail:
            at = HEADER_BYTES + (self._next & (self._capacity - 1))
            half = at // 4
            # Copied out once: a peer that writes where it must not cannot change what has been checked.
            word, seq, check, tag = (self._halves[half + i] for i in range(4))
            padding, length = word & PADDING, word & ~PADDING
            epoch = tag >> 16 & EPOCH_MASK
            if fault := self._misplaced(padding, length) or self._out_of_turn(seq, epoch):
                self._give_up(fault)
                return None
            start = at + RECORD_HEADER
            payload = self._data[start:start] if padding else self._data[start : start + length]
            if self._checksum and check != _check(word, seq, tag, payload):
                payload.release()
                self._give_up(Fault.CHECK)
                return None
            self._next += RECORD_HEADER + layout.aligned(length)
            if not padding:
                self._epoch, self._seq = epoch, (seq + 1) & _U32
                return tag & MAX_KIND, tag >> 16, payload
        return None

    def _misplaced(self, padding: int, length: int) -> Fault | None:
        contiguous, available = self._contiguous(self._next), self._tail - self._next
        if padding:
            return Fault.PADDING if length != contiguous - RECORD_HEADER or contiguous > available else None
        total = RECORD_HEADER + layout.aligned(length)
        return Fault.LENGTH if length > self._max_record or total > contiguous or total > available else None

    def _out_of_turn(self, seq: int, epoch: int) -> Fault | None:
        """The first record after an attach may carry any number, the first of a new producer must carry 0."""
        if self._epoch is None:
            return None
        return None if seq == (self._seq if epoch == self._epoch else 0) else Fault.SEQ

    def _gather(self, kind: int, first: memoryview) -> memoryview | None:
        """The fragments of one message put together; None if they do not belong together."""
        parts = bytearray(first)
        flags = FLAG_MORE
        while flags & FLAG_MORE:
            record = self._record()
            if record is None or record[0] != kind:
                if self._fault is None:
                    self._give_up(Fault.FRAGMENT)
                return None
            flags = record[1]
            parts += record[2]
            record[2].release()
        return memoryview(parts).toreadonly()

    def _handle(self, handler: Handler) -> bool:
        if self._fault or (self._next == self._tail and not self._look_at_tail()):
            return False
        record = self._record()
        if record is None:
            return False
        kind, flags, payload = record
        if flags & FLAG_MORE:
            whole = self._gather(kind, payload)
            payload.release()
            if whole is None:
                return False
            payload = whole
        self._received += 1
        view = payload.toreadonly()
        try:
            handler(kind, view)
        finally:
            view.release()
            payload.release()
        return True

    def _release(self) -> None:
        """Gives everything read back and tells the producer, if it waits for room and a quarter is free."""
        if self._next == self._head:
            return
        self._head = self._next
        self._words[_HEAD] = self._head
        _fast_fence()
        self._words[_RECV_COUNT] = self._received
        self._count(_BATCHES)
        if not self._words[_PRODUCER_WAITING]:
            return
        free = self._capacity - (self._words[_TAIL] - self._head)
        if free >= self._capacity // 4 and self._wake(_PRODUCER_WAITING, self._event):
            self._count(_SPACE_WAKES_SENT)
