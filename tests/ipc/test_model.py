"""The ring against a deque, with the ring's space arithmetic written a second time."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ipc.layout import RingSpec
from ipc.ring import PushResult
from tests.ipc.rings import PAIRS, Ring, readable

SPEC = RingSpec(ring_id=1, capacity=4096, max_record=512, checksum=True)
STARTS = (0, 16, 4080, (1 << 32) - 512, (1 << 63) - 2048)
SIZES = st.one_of(
    st.integers(0, 64),
    st.integers(0, SPEC.max_record),
    st.sampled_from([SPEC.max_record - 1, SPEC.max_record, SPEC.max_record + 1]),
    st.integers(0, SPEC.max_message),
)


def end_of_message(position: int, size: int) -> int:
    """The cursor behind a message of `size` bytes that is written at `position`."""
    room = SPEC.capacity - position % SPEC.capacity
    if size <= SPEC.max_record:
        record = 16 + (size + 15) // 16 * 16
        return position + record if record <= room else position + room + record
    while size:
        piece = min(size, SPEC.max_record, SPEC.capacity - position % SPEC.capacity - 16)
        position += 16 + (piece + 15) // 16 * 16
        size -= piece
    return position


class RingMachine(RuleBasedStateMachine):
    """What is in the ring, where its cursors are, and who waits."""

    pair = PAIRS[0]

    def __init__(self) -> None:
        super().__init__()
        self.ring: Ring | None = None
        self.queue: deque[tuple[int, bytes, int]] = deque()
        self.number = 0
        self.consumer_waits = self.data_event = False

    @initialize(start=st.sampled_from(STARTS))
    def create(self, start: int) -> None:
        self.ring = Ring(SPEC, *self.pair, start=start)
        self.tail = self.head = start

    def teardown(self) -> None:
        if self.ring is not None:
            self.ring.close()

    def message(self, size: int) -> tuple[int, bytes]:
        self.number += 1
        return self.number, (self.number.to_bytes(4, "little") * (size // 4 + 1))[:size]

    def fits(self, size: int) -> bool:
        return end_of_message(self.tail, size) - self.head <= SPEC.capacity

    def accept(self, kind: int, payload: bytes) -> None:
        self.tail = end_of_message(self.tail, len(payload))
        self.queue.append((kind, payload, self.tail))

    def wake(self) -> bool:
        woken, self.consumer_waits = self.consumer_waits, False
        self.data_event |= woken
        return woken

    @rule(size=SIZES)
    def push(self, size: int) -> None:
        kind, payload = self.message(size)
        result = self.ring.producer.try_push(payload, kind)
        if self.fits(size):
            self.accept(kind, payload)
            assert result is (PushResult.PUBLISHED_WOKE if self.wake() else PushResult.PUBLISHED)
        else:
            assert result is PushResult.FULL

    @rule(sizes=st.lists(SIZES, max_size=6))
    def push_many(self, sizes: list[int]) -> None:
        payloads = [self.message(size)[1] for size in sizes]
        taken = self.ring.producer.try_push_many(payloads, 9)
        for payload in payloads[:taken]:
            assert self.fits(len(payload))
            self.accept(9, payload)
        assert taken == len(payloads) or not self.fits(len(payloads[taken]))
        if taken:
            self.wake()

    @rule(limit=st.integers(1, 20))
    def poll(self, limit: int) -> None:
        expected = [self.queue.popleft() for _ in range(min(limit, len(self.queue)))]
        got = self.ring.read(max_records=limit, max_bytes=1 << 20)
        assert got == [(kind, payload) for kind, payload, _ in expected]
        if expected:
            self.head = expected[-1][2]

    @rule()
    def prepare_wait(self) -> None:
        self.consumer_waits = self.ring.consumer.prepare_wait()
        assert self.consumer_waits is not bool(self.queue)

    @rule()
    def cancel_wait(self) -> None:
        self.ring.consumer.cancel_wait()
        self.consumer_waits = False

    @rule(size=SIZES)
    def wait_for_room(self, size: int) -> None:
        assert self.ring.producer.prepare_wait(size) is not self.fits(size)

    @rule()
    def read_event(self) -> None:
        assert readable(self.ring.data) is self.data_event
        self.data_event = False

    @rule()
    def restart_producer(self) -> None:
        self.ring.restart_producer()
        self.data_event = True

    @rule()
    @precondition(lambda self: self.ring is not None)
    def restart_consumer(self) -> None:
        self.ring.restart_consumer()

    @rule()
    def restart_consumer_with_stale_messages(self) -> None:
        self.ring.restart_consumer()
        stale: list[tuple[int, bytes]] = []
        count = self.ring.consumer.attach_policy(lambda kind, view: stale.append((kind, bytes(view))))
        assert count == len(self.queue)
        assert stale == [(kind, payload) for kind, payload, _ in self.queue]
        if self.queue:
            self.head = self.queue[-1][2]
            self.queue.clear()

    @invariant()
    @precondition(lambda self: self.ring is not None)
    def cursors(self) -> None:
        assert self.ring.producer.free_bytes == SPEC.capacity - (self.tail - self.head)
        assert self.ring.consumer.position == self.head
        assert self.ring.consumer.pending == self.tail - self.head


def check(pair: tuple[str, str], examples: int) -> None:
    machine = type("PairMachine", (RingMachine,), {"pair": pair})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None, database=None)
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_ring_behaves_like_a_deque(pair: tuple[str, str]) -> None:
    check(pair, 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pair", PAIRS)
def test_ring_behaves_like_a_deque_for_long(pair: tuple[str, str]) -> None:
    check(pair, 2000)
