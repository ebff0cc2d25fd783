"""A full ring: the sender never waits, order is kept, and every rejection is seen by the caller and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from ipc.errors import MessageTooLargeError, RingClosedError
from ipc.layout import State
from ipc.outbox import Outbox
from ipc.ring import RingProducer
from tests.ipc.rings import SMALL, Ring, readable


def payload(number: int) -> bytes:
    return number.to_bytes(8, "little") * 10


def numbers(messages: list[tuple[int, bytes]]) -> list[int]:
    return [int.from_bytes(body[:8], "little") for _, body in messages]


def test_order_is_kept_across_ring_and_spill(ring: Ring) -> None:
    outbox = Outbox(ring.producer, spill_records=50)
    accepted = [number for number in range(200) if outbox.send(payload(number), 1)]
    depth = outbox.depth
    assert depth == (50, 50 * 80)
    stats = ring.segment.stats()
    assert (stats["spill_records"], stats["spill_bytes"], stats["rejected"]) == (50, 4000, 200 - len(accepted))
    assert accepted == list(range(len(accepted)))
    got: list[int] = []
    while outbox.depth[0] or ring.consumer.pending:
        got += numbers(ring.read(max_records=7))
        outbox.flush()
    assert got == accepted
    assert ring.segment.stats()["spill_bytes"] == 0
    assert outbox.send(payload(1000), 1)
    assert numbers(ring.read_all()) == [1000]


def test_spill_is_bounded_in_bytes(ring: Ring) -> None:
    outbox = Outbox(ring.producer, spill_records=1000, spill_bytes=1000)
    while outbox.send(bytes(300), 1):
        assert outbox.depth[1] <= 1000
    assert outbox.depth == (3, 900)
    assert outbox.send(bytes(100), 1)
    assert not outbox.send(bytes(1), 1)


def test_a_later_send_moves_the_spill_first(ring: Ring) -> None:
    outbox = Outbox(ring.producer)
    for number in range(60):
        outbox.send(payload(number), 1)
    assert outbox.depth[0] > 0
    first = numbers(ring.read_all())
    outbox.send(payload(60), 1)
    assert outbox.depth[0] == 0
    assert first + numbers(ring.read_all()) == list(range(61))


def test_the_first_spilled_message_announces_that_room_is_wanted(ring: Ring) -> None:
    outbox = Outbox(ring.producer)
    while not outbox.depth[0]:
        outbox.send(payload(1), 1)
    assert not readable(ring.space)
    assert not outbox.overdue
    ring.read_all()
    assert readable(ring.space)
    assert outbox.overdue
    assert outbox.flush() == 1
    assert not outbox.overdue


def test_flush_of_nothing(ring: Ring) -> None:
    assert Outbox(ring.producer).flush() == 0


def test_a_message_that_never_fits_is_refused_even_behind_a_spill(ring: Ring) -> None:
    outbox = Outbox(ring.producer)
    for _ in range(2):
        with pytest.raises(MessageTooLargeError):
            outbox.send(bytes(SMALL.max_message + 1), 1)
        while not outbox.depth[0]:
            outbox.send(payload(1), 1)
    assert outbox.depth[0] == 1


def test_a_closed_ring_refuses(ring: Ring) -> None:
    outbox = Outbox(ring.producer)
    ring.segment.advance(State.CLOSED)
    with pytest.raises(RingClosedError):
        outbox.send(b"x", 1)


def test_a_new_outbox_shows_its_own_depth(ring: Ring) -> None:
    outbox = Outbox(ring.producer)
    while not outbox.depth[0]:
        outbox.send(payload(1), 1)
    Outbox(ring.producer)
    assert ring.segment.stats()["spill_records"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("spill_records", [4096, 1 << 20])
def test_send_stays_quick_while_the_consumer_is_stopped(
    ring: Ring, spill_records: int, record_property: Callable[[str, object], None]
) -> None:
    """5 s of sends into a ring that nobody reads. `record_property` keeps the times: a busy host cannot fail this."""
    outbox = Outbox(ring.producer, spill_records=spill_records)
    times, end, sent, refused = [], time.perf_counter() + 5, 0, 0
    while time.perf_counter() < end:
        before = time.perf_counter_ns()
        taken = outbox.send(b"x" * 64, 1)
        times.append(time.perf_counter_ns() - before)
        sent += taken
        refused += not taken
    times.sort()
    record_property("send_p99_ns", times[len(times) * 99 // 100])
    assert ring.segment.stats()["rejected"] == refused > 0
    assert outbox.depth[0] == min(spill_records, (8 << 20) // 64)
    received = 0
    while outbox.depth[0] or ring.consumer.pending:
        received += len(ring.read_all())
        outbox.flush()
    assert received == sent


def test_gathered_messages_leave_together_and_in_order(ring: Ring) -> None:
    outbox = Outbox(ring.producer)
    outbox.gather()
    assert all(outbox.send(bytes([number]), 1) for number in range(5))
    assert outbox.depth == (5, 5)
    assert ring.consumer.pending == 0
    outbox.release()
    assert outbox.depth == (0, 0)
    assert [body for _, body in ring.read_all()] == [bytes([number]) for number in range(5)]
    assert outbox.send(b"x", 1)
    assert outbox.depth == (0, 0)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Kind and number of the messages of each batch that a ring is given."""
    batches: list[tuple[int, int]] = []
    push_many = RingProducer.try_push_many

    def watched(producer: RingProducer, payloads: Sequence[bytes], kind: int) -> int:
        batches.append((kind, len(payloads)))
        return push_many(producer, payloads, kind)

    monkeypatch.setattr(RingProducer, "try_push_many", watched)
    return batches


def test_a_full_ring_is_asked_with_one_message(ring: Ring, pushed: list[tuple[int, int]]) -> None:
    outbox = Outbox(ring.producer, spill_records=50)
    sent = sum(outbox.send(payload(number), 1) for number in range(200))
    assert outbox.depth[0] == 50
    assert set(pushed) == {(1, 1)}
    pushed.clear()
    got = numbers(ring.read_all())
    outbox.flush()
    assert max(pushed)[1] > 10
    while ring.consumer.pending:
        got += numbers(ring.read_all())
        outbox.flush()
    assert got == list(range(sent))


def test_gathered_messages_of_a_kind_are_published_by_one_store(ring: Ring, pushed: list[tuple[int, int]]) -> None:
    outbox = Outbox(ring.producer)
    outbox.gather()
    assert all(outbox.send(b"x", kind) for kind in (1, 1, 1, 2, 1))
    outbox.release()
    assert pushed == [(1, 3), (2, 1), (1, 1)]
    assert [kind for kind, _ in ring.read_all()] == [1, 1, 1, 2, 1]


def test_so_many_messages_leave_before_the_others(ring: Ring, pushed: list[tuple[int, int]]) -> None:
    outbox = Outbox(ring.producer)
    outbox.gather(2)
    assert all(outbox.send(bytes([number]), 1) for number in range(5))
    assert pushed == [(1, 2), (1, 2)]
    outbox.release()
    assert pushed == [(1, 2), (1, 2), (1, 1)]
    assert [body for _, body in ring.read_all()] == [bytes([number]) for number in range(5)]
    outbox.gather()
    assert all(outbox.send(b"x", 1) for _ in range(5))
    assert outbox.depth == (5, 5)


def test_what_was_there_before_is_none_of_those_that_are_gathered(ring: Ring) -> None:
    outbox = Outbox(ring.producer)
    sent = 0
    while not outbox.depth[0]:
        assert outbox.send(payload(sent), 1)
        sent += 1
    got = numbers(ring.read_all())
    outbox.gather(2)
    for number in range(sent, sent + 2):
        assert outbox.send(payload(number), 1)
    assert outbox.depth == (0, 0)
    assert got + numbers(ring.read_all()) == list(range(sent + 2))


def test_gathering_takes_no_more_than_the_spill_and_then_sends(ring: Ring) -> None:
    outbox = Outbox(ring.producer, spill_records=2)
    outbox.gather()
    assert all(outbox.send(bytes([number]), 1) for number in range(5))
    assert outbox.depth[0] <= 2
    outbox.release()
    assert [body for _, body in ring.read_all()] == [bytes([number]) for number in range(5)]
