"""One ring with both ends in this process: what a caller may rely on."""

from __future__ import annotations

import pytest

from ipc import layout
from ipc.errors import (
    MessageTooLargeError,
    RingClosedError,
    RingPoisonedError,
    RoleTakenError,
    SegmentError,
)
from ipc.layout import RingSpec, State
from ipc.ring import PushResult, RingConsumer, RingProducer
from ipc.segment import SharedSegment
from tests.ipc.rings import CORES, PAIRS, SMALL, Ring, open_ring, readable

SIZES = (0, 1, 16, 1008, 1009, 1023, 1024, 1025, 2048, 3000, SMALL.max_message)


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_every_wrap_position(producer: str, consumer: str) -> None:
    """An empty ring takes every legal message wherever its cursors stand."""
    for position in range(0, SMALL.capacity, 16):
        with open_ring(producer=producer, consumer=consumer, start=position) as ring:
            for size in SIZES:
                payload = bytes([position // 16 & 255]) * size
                assert ring.producer.try_push(payload, size) is PushResult.PUBLISHED, (position, size)
                assert ring.read_all() == [(size, payload)]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("start", [(1 << 32) - 1024, (1 << 63) - 1024])
def test_cursors_pass_large_powers_of_two(core: str, start: int) -> None:
    with open_ring(producer=core, consumer=core, start=start) as ring:
        for number in range(100):
            ring.producer.try_push(b"%d" % number, 1)
            assert ring.read_all() == [(1, b"%d" % number)]
        assert ring.consumer.position > start + 1024


def test_sequence_numbers_wrap() -> None:
    with open_ring(producer="python", consumer="c") as ring:
        ring.producer._core._seq = 0xFFFFFFFE  # type: ignore[attr-defined]
        for number in range(4):
            ring.producer.try_push(bytes([number]), 1)
        assert [payload[0] for _, payload in ring.read_all()] == [0, 1, 2, 3]


def test_a_full_ring_takes_nothing(ring: Ring) -> None:
    pushed = 0
    while ring.producer.try_push(b"x" * 240, 1):
        pushed += 1
    assert pushed == 16
    assert ring.producer.free_bytes == 0
    assert ring.segment.stats()["full_events"] == 1
    assert len(ring.read_all()) == 16
    assert ring.producer.free_bytes == SMALL.capacity


def test_push_many_publishes_what_fits(ring: Ring) -> None:
    assert ring.producer.try_push_many([b"x" * 1000] * 9, 2) == 4
    assert ring.producer.try_push_many([b"y" * 1000], 2) == 0
    assert ring.producer.try_push_many([], 2) == 0
    assert ring.read_all() == [(2, b"x" * 1000)] * 4
    assert ring.producer.try_push_many([b"z", bytes(SMALL.max_message + 1), b"z"], 2) == 1
    with pytest.raises(MessageTooLargeError):
        ring.producer.try_push_many([bytes(SMALL.max_message + 1)], 2)
    assert ring.read_all() == [(2, b"z")]


def test_push_many_keeps_what_came_before_a_wrong_payload(ring: Ring) -> None:
    with pytest.raises(TypeError):
        ring.producer.try_push_many([b"good", "not bytes", b"never"], 2)  # type: ignore[list-item]
    assert ring.read_all() == [(2, b"good")]


def test_one_byte_too_many_is_refused_with_the_limit(ring: Ring) -> None:
    with pytest.raises(MessageTooLargeError, match=str(SMALL.max_message)):
        ring.producer.try_push(bytes(SMALL.max_message + 1), 1)
    assert ring.read_all() == []


@pytest.mark.parametrize("kind", [-1, 65536])
def test_kind_is_sixteen_bits(ring: Ring, kind: int) -> None:
    with pytest.raises(ValueError, match="kind"):
        ring.producer.try_push(b"", kind)


def test_payloads_of_any_buffer_type(ring: Ring) -> None:
    for payload in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"abcd").cast("I")):
        ring.producer.try_push(payload, 1)
    assert ring.read_all() == [(1, b"abcd")] * 4


def test_poll_stops_at_its_limits(ring: Ring) -> None:
    for _ in range(10):
        ring.producer.try_push(b"x" * 100, 1)
    assert len(ring.read(max_records=3)) == 3
    assert len(ring.read(max_bytes=200)) == 2
    assert len(ring.read_all()) == 5


def test_room_comes_back_after_the_batch_not_before(ring: Ring) -> None:
    before = ring.producer.free_bytes
    seen = []
    ring.producer.try_push(b"x" * 100, 1)
    ring.consumer.poll(lambda _, view: seen.append((len(view), ring.producer.free_bytes)))
    assert seen == [(100, before - 128)]
    assert ring.producer.free_bytes == before


def test_a_view_is_read_only_and_dies_with_its_handler(ring: Ring) -> None:
    kept: list[memoryview] = []

    def keep(_: int, view: memoryview) -> None:
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 0
        with view[:1]:
            pass

    ring.producer.try_push(b"secret", 1)
    ring.consumer.poll(keep)
    ring.producer.try_push(b"secret", 1)
    if ring.cores[1].__name__ == "ipc._ring":  # type: ignore[attr-defined]
        with pytest.raises(BufferError, match="kept a view"):
            ring.consumer.poll(lambda _, view: kept.append(view[1:]))
        with pytest.raises(BufferError):
            ring.consumer.close()
        kept.pop().release()
    else:
        ring.consumer.poll(lambda _, view: kept.append(view))
        with pytest.raises(ValueError, match="released"):
            kept[0].tobytes()
    ring.producer.try_push(b"next", 1)
    assert ring.read_all() == [(1, b"next")]


def test_an_error_of_the_handler_passes_and_its_message_counts_as_handled(ring: Ring) -> None:
    seen = []

    def handler(kind: int, view: memoryview) -> None:
        seen.append(kind)
        if kind == 2:
            raise KeyError("broken")

    for kind in (1, 2, 3):
        ring.producer.try_push(b"x", kind)
    with pytest.raises(KeyError, match="broken"):
        ring.consumer.poll(handler)
    assert ring.consumer.poll(handler) == 1
    assert seen == [1, 2, 3]


def test_a_handler_must_not_read_its_own_ring(ring: Ring) -> None:
    ring.producer.try_push(b"x", 1)
    with pytest.raises(RuntimeError, match="in use"):
        ring.consumer.poll(lambda *_: ring.consumer.poll(lambda *_: None) and None)


def test_wake_only_a_sleeper_and_only_once(ring: Ring) -> None:
    assert ring.producer.try_push(b"x", 1) is PushResult.PUBLISHED
    assert ring.consumer.prepare_wait() is False
    ring.read_all()
    assert ring.consumer.prepare_wait() is True
    assert ring.producer.try_push(b"x", 1) is PushResult.PUBLISHED_WOKE
    assert ring.producer.try_push(b"x", 1) is PushResult.PUBLISHED
    assert readable(ring.data)
    ring.read_all()
    assert ring.consumer.prepare_wait() is True
    ring.consumer.cancel_wait()
    assert ring.producer.try_push(b"x", 1) is PushResult.PUBLISHED
    assert not readable(ring.data)
    assert ring.segment.stats()["wakes_sent"] == 1


def test_space_is_announced_once_a_quarter_is_free(ring: Ring) -> None:
    while ring.producer.try_push(b"x" * 112, 1):
        pass
    assert ring.producer.prepare_wait(112) is True
    ring.read(max_records=7)
    assert not readable(ring.space)
    ring.read(max_records=1)
    assert readable(ring.space)
    ring.read_all()
    assert not readable(ring.space)
    assert ring.producer.prepare_wait(112) is False
    assert ring.segment.stats()["space_wakes_sent"] == 1


def test_a_message_as_large_as_the_ring_waits_until_the_ring_is_empty(ring: Ring) -> None:
    for _ in range(8):
        ring.producer.try_push(b"x" * 496, 1)
    big = bytes(SMALL.max_message)
    reads = 0
    while ring.producer.try_push(big, 2) is PushResult.FULL:
        if ring.producer.prepare_wait(len(big)):
            ring.read(max_records=1)
            reads += 1
    assert reads == 8
    assert ring.read_all() == [(2, big)]


def test_spin_sees_data_and_gives_up(ring: Ring) -> None:
    assert ring.consumer.spin(10) is False
    ring.producer.try_push(b"x", 1)
    assert ring.consumer.spin(10) is True


def test_a_new_producer_starts_its_numbers_again(ring: Ring) -> None:
    ring.producer.try_push(b"old", 1)
    ring.producer.try_push(b"old", 1)
    ring.read(max_records=1)
    ring.restart_producer()
    ring.producer.try_push(b"new", 1)
    assert [payload for _, payload in ring.read_all()] == [b"old", b"new"]
    assert ring.segment.stats()["producer_epoch"] == 2


def test_a_restarted_consumer_hands_old_messages_over(ring: Ring) -> None:
    for number in range(100):
        ring.producer.try_push(b"%d" % number, 1)
    ring.read(max_records=10)
    ring.restart_consumer()
    stale = []

    def refuse(_: int, view: memoryview) -> None:
        stale.append(int(bytes(view)))
        ring.producer.try_push(b"after", 2)

    assert ring.consumer.attach_policy(refuse) == 90
    assert stale == list(range(10, 100))
    assert ring.read_all() == [(2, b"after")] * 90
    stats = ring.segment.stats()
    assert (stats["consumer_epoch"], stats["stale_records"]) == (2, 90)


def test_closed_refuses_pushes_and_still_reads(ring: Ring) -> None:
    ring.producer.try_push(b"x", 1)
    ring.segment.advance(State.DRAINING)
    ring.producer.try_push(b"y", 1)
    ring.segment.advance(State.CLOSED)
    with pytest.raises(RingClosedError, match="1->2"):
        ring.producer.try_push(b"z", 1)
    assert len(ring.read_all()) == 2
    with pytest.raises(SegmentError, match="CLOSED to OPEN"):
        ring.segment.advance(State.OPEN)


def test_poisoned_stops_both_ends(ring: Ring) -> None:
    ring.producer.try_push(b"x", 1)
    ring.segment.advance(State.POISONED)
    assert ring.consumer.prepare_wait() is False
    with pytest.raises(RingPoisonedError):
        ring.consumer.poll(lambda *_: None)
    with pytest.raises(RingPoisonedError):
        ring.producer.try_push(b"y", 1)
    assert ring.segment.stats()["bad_records"] == 0


def test_a_consumer_cursor_that_cannot_be_poisons_the_ring(ring: Ring) -> None:
    while ring.producer.try_push(b"x" * 1000, 1):
        pass
    ring.mapped.words[layout.OFF_HEAD // 8] = 1 << 40
    with pytest.raises(RingPoisonedError):
        ring.producer.try_push(b"x" * 1000, 1)


def test_each_end_has_one_holder(ring: Ring) -> None:
    with pytest.raises(RoleTakenError, match="producer"):
        RingProducer(ring.mapped, ring.data)
    with pytest.raises(RoleTakenError, match="consumer"):
        RingConsumer(ring.segment, ring.data)
    with pytest.raises(RoleTakenError):
        RingProducer(ring.segment, ring.data)
    ring.producer.close()
    with RingProducer(ring.mapped, ring.data) as producer:
        producer.try_push(b"x", 1)
    ring.producer = RingProducer(ring.segment, ring.data)


def test_a_closed_end_refuses_work_and_closes_twice(ring: Ring) -> None:
    with pytest.raises(SegmentError, match="close its producer"):
        ring.segment.close()
    ring.producer.close()
    ring.consumer.close()
    ring.producer.close()
    ring.consumer.close()
    for use in (lambda: ring.producer.try_push(b"", 1), lambda: ring.consumer.poll(lambda *_: None)):
        with pytest.raises(ValueError, match=r"closed|released"):
            use()


def test_counters_survive_a_restart(ring: Ring) -> None:
    ring.producer.try_push(b"x", 1)
    ring.restart_producer()
    ring.producer.try_push(b"x", 1)
    ring.read_all()
    stats = ring.segment.stats()
    assert (stats["sent"], stats["received"], stats["kicks"], stats["fill_bytes"]) == (2, 2, 2, 0)


def test_large_rings_take_messages_above_the_record_limit() -> None:
    spec = RingSpec(ring_id=3)
    segment = SharedSegment.create(spec)
    segment.close()
    assert spec.max_message == (1 << 20) - 16 * 6
