"""Rings on an event loop, with asyncio's own loop and uvloop."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from ipc import layout
from ipc.core import Handler
from ipc.errors import RingPoisonedError
from ipc.eventfd import create_event
from ipc.layout import State
from ipc.outbox import Outbox
from ipc.reader import RingReader
from ipc.ring import RingProducer
from ipc.writer import RingWriter
from tests.ipc.rings import Ring

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
LIMIT = 50  # seconds; only a broken reader comes near it
Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT):
                await main()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(limited())

    return run


class Inbox:
    """A handler that remembers and lets a test wait for a number of messages."""

    def __init__(self) -> None:
        self.got: list[tuple[int, bytes]] = []
        self._changed = asyncio.Event()

    def __call__(self, kind: int, view: memoryview) -> None:
        self.got.append((kind, bytes(view)))
        self._changed.set()

    async def wait_for(self, count: int) -> None:
        while len(self.got) < count:
            self._changed.clear()
            await self._changed.wait()


def start_reader(ring: Ring, handler: Handler, **options: object) -> RingReader:
    reader = RingReader(asyncio.get_running_loop(), ring.consumer, handler, **options)  # type: ignore[arg-type]
    reader.start()
    reader.start()
    return reader


async def asleep(ring: Ring) -> None:
    """Waits until the reader has announced a sleep."""
    while not ring.segment.words[layout.OFF_CONSUMER_WAITING // 8]:
        await asyncio.sleep(0)


def test_messages_before_and_after_a_sleep(ring: Ring, run: Run) -> None:
    async def main() -> None:
        inbox = Inbox()
        ring.producer.try_push(b"before", 1)
        reader = start_reader(ring, inbox)
        for number in range(50):
            await asleep(ring)
            ring.producer.try_push(b"%d" % number, 2)
            await inbox.wait_for(number + 2)
        await reader.aclose()
        assert inbox.got == [(1, b"before"), *((2, b"%d" % number) for number in range(50))]

    run(main)
    stats = ring.segment.stats()
    assert stats["wakes_received"] == stats["wakes_sent"] == 50
    assert (stats["rescues"], stats["empty_wakes"]) == (0, 0)


def test_a_kick_without_data_is_an_empty_wake(ring: Ring, run: Run) -> None:
    async def main() -> None:
        reader = start_reader(ring, Inbox())
        await asleep(ring)
        ring.producer.kick()
        while not ring.segment.stats()["empty_wakes"]:
            await asyncio.sleep(0)
        await reader.aclose()

    run(main)
    assert ring.segment.stats()["wakes_received"] == 1


def test_nothing_is_read_after_aclose(ring: Ring, run: Run) -> None:
    async def main() -> None:
        inbox = Inbox()
        reader = start_reader(ring, inbox)
        await asleep(ring)
        await reader.aclose()
        await reader.aclose()
        ring.producer.try_push(b"x", 1)
        await asyncio.sleep(0.01)
        assert inbox.got == []
        reader.start()
        await inbox.wait_for(1)
        await reader.aclose()

    run(main)


def test_catching_up_reads_at_once_and_goes_on_as_before(ring: Ring, run: Run) -> None:
    async def main() -> None:
        inbox = Inbox()
        reader = start_reader(ring, inbox)
        await asleep(ring)
        for number in range(70):
            ring.producer.try_push(bytes([number]), 1)
        reader.catch_up()
        assert [view[0] for _, view in inbox.got] == list(range(70))
        reader.catch_up()
        ring.producer.try_push(b"x", 2)
        await inbox.wait_for(71)
        await reader.aclose()
        ring.producer.try_push(b"y", 2)
        reader.catch_up()
        assert inbox.got[70:] == [(2, b"x")]

    run(main)


def test_a_handler_may_close_its_reader(ring: Ring, run: Run) -> None:
    async def main() -> None:
        closing: list[asyncio.Task[None]] = []

        def handler(kind: int, _: memoryview) -> None:
            closing.append(asyncio.ensure_future(reader.aclose()))

        reader = start_reader(ring, handler)
        ring.producer.try_push(b"x", 1)
        while not closing:
            await asyncio.sleep(0)
        await closing[0]
        ring.producer.try_push(b"y", 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (len(closing), ring.consumer.pending > 0) == (1, True)

    run(main)


def test_other_callbacks_run_between_turns(ring: Ring, run: Run) -> None:
    """The handler keeps the ring full, so that without a budget the loop would never come back."""

    async def main() -> None:
        turns = 0
        handled: list[int] = []

        def handler(_: int, view: memoryview) -> None:
            handled.append(turns)
            if len(handled) < 200:
                ring.producer.try_push(bytes(100), 1)

        ring.producer.try_push_many([bytes(100)] * 4, 1)
        reader = start_reader(ring, handler, fairness_bytes=512)
        while len(handled) < 200:
            turns += 1
            await asyncio.sleep(0)
        await reader.aclose()
        assert len(set(handled)) >= 200 // 8

    run(main)


def test_an_error_of_the_handler_is_reported_and_reading_goes_on(ring: Ring, run: Run) -> None:
    async def main() -> None:
        inbox = Inbox()
        reports: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["exception"]))

        def handler(kind: int, view: memoryview) -> None:
            inbox(kind, view)
            if kind == 2:
                raise KeyError("broken")

        reader = start_reader(ring, handler)
        for kind in (1, 2, 3):
            ring.producer.try_push(b"x", kind)
        await inbox.wait_for(3)
        await asleep(ring)
        ring.producer.try_push(b"x", 4)
        await inbox.wait_for(4)
        await reader.aclose()
        assert [str(error) for error in reports] == ["'broken'"]

    run(main)


@pytest.mark.parametrize("own_handler", [True, False])
def test_a_poisoned_ring_stops_the_reader(ring: Ring, run: Run, own_handler: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        reports: asyncio.Queue[BaseException] = asyncio.Queue()
        loop.set_exception_handler(lambda _, context: reports.put_nowait(context["exception"]))
        reader = start_reader(ring, Inbox(), on_poisoned=reports.put_nowait if own_handler else None)
        await asleep(ring)
        ring.producer.try_push(b"x", 1)
        ring.segment.buffer[4096 + 16] ^= 1
        assert isinstance(await reports.get(), RingPoisonedError)
        ring.producer.kick()
        await asyncio.sleep(0.01)
        assert reports.empty()
        await reader.aclose()

    run(main)
    assert ring.segment.state is State.POISONED


def test_spin_takes_messages_without_a_wake(ring: Ring, run: Run) -> None:
    """The reader blocks the loop while it spins, so another thread pushes, until a spin has seen a message."""
    hit = threading.Event()

    def push() -> None:
        while not hit.wait(0.001):
            ring.producer.try_push(b"x", 1)

    async def main() -> None:
        def handler(*_: object) -> None:
            if ring.segment.stats()["spin_hits"]:
                reader.spin_us = 0
                hit.set()

        pushing = asyncio.get_running_loop().run_in_executor(None, push)
        reader = start_reader(ring, handler, spin_us=100_000)
        await pushing
        await reader.aclose()

    run(main)
    assert ring.segment.stats()["spin_hits"] > 0


def test_a_lost_wake_is_rescued_and_counted(ring: Ring, run: Run) -> None:
    """The producer signals an eventfd that nobody reads."""
    ring.producer.close()
    elsewhere = create_event()
    ring.producer = RingProducer(ring.segment, elsewhere, core=ring.cores[0])

    async def main() -> None:
        inbox = Inbox()
        reader = start_reader(ring, inbox)
        await asleep(ring)
        ring.producer.try_push(b"x", 1)
        await inbox.wait_for(1)
        await reader.aclose()

    run(main)
    os.close(elsewhere)
    stats = ring.segment.stats()
    assert (stats["rescues"], stats["wakes_received"]) == (1, 0)


def test_a_late_wake_is_not_counted_as_lost(ring: Ring, run: Run) -> None:
    ring.producer.close()
    elsewhere = create_event()
    ring.producer = RingProducer(ring.segment, elsewhere, core=ring.cores[0])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        inbox = Inbox()
        reader = start_reader(ring, inbox)
        await asleep(ring)
        ring.producer.try_push(b"x", 1)
        looks = 0
        plain = reader._rescue._missed

        def missed() -> bool:
            nonlocal looks
            looks += 1
            if looks == 1:
                loop.call_soon(os.eventfd_write, ring.data, 1)
            return plain()

        reader._rescue._missed = missed  # type: ignore[method-assign]
        await inbox.wait_for(1)
        while looks < 2:
            await asyncio.sleep(0.01)
        await reader.aclose()

    run(main)
    os.close(elsewhere)
    assert ring.segment.stats()["rescues"] == 0


def test_a_writer_flushes_the_spill_as_room_appears(ring: Ring, run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        inbox = Inbox()
        outbox = Outbox(ring.producer)
        writer = RingWriter(loop, outbox)
        writer.start()
        for number in range(2000):
            assert outbox.send(b"%d" % number, 1)
        assert outbox.depth[0] > 1000
        reader = start_reader(ring, inbox)
        await inbox.wait_for(2000)
        await writer.aclose()
        await reader.aclose()
        assert inbox.got == [(1, b"%d" % number) for number in range(2000)]

    run(main)
    stats = ring.segment.stats()
    assert stats["space_wakes"] > 0
    assert (stats["space_rescues"], stats["rescues"], stats["spill_records"]) == (0, 0, 0)


def test_a_lost_space_wake_is_rescued_and_counted(ring: Ring, run: Run) -> None:
    async def main() -> None:
        outbox = Outbox(ring.producer)
        writer = RingWriter(asyncio.get_running_loop(), outbox)
        writer.start()
        while not outbox.depth[0]:
            outbox.send(bytes(100), 1)
        ring.read_all()
        ring.clear_events()
        while outbox.depth[0]:
            await asyncio.sleep(0.01)
        await writer.aclose()

    run(main)
    assert ring.segment.stats()["space_rescues"] == 1


def test_a_writer_stops_at_a_closed_ring(ring: Ring, run: Run) -> None:
    async def main() -> None:
        outbox = Outbox(ring.producer)
        writer = RingWriter(asyncio.get_running_loop(), outbox)
        writer.start()
        while not outbox.depth[0]:
            outbox.send(bytes(100), 1)
        ring.segment.advance(State.CLOSED)
        ring.read_all()
        while writer._running:
            await asyncio.sleep(0.01)

    run(main)


def test_a_writer_needs_a_space_event(ring: Ring, run: Run) -> None:
    ring.producer.close()
    ring.producer = RingProducer(ring.segment, ring.data, core=ring.cores[0])

    async def main() -> None:
        with pytest.raises(ValueError, match="space event"):
            RingWriter(asyncio.get_running_loop(), Outbox(ring.producer))

    run(main)


IDLE = """
import asyncio, json, resource, sys, uvloop
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.outbox import Outbox
from ipc.reader import RingReader
from ipc.ring import RingConsumer, RingProducer
from ipc.segment import SharedSegment
from ipc.writer import RingWriter

async def main(seconds, rings=6):
    loop = asyncio.get_running_loop()
    for number in range(rings):
        segment, data, space = SharedSegment.create(RingSpec(ring_id=number)), create_event(), create_event()
        RingReader(loop, RingConsumer(segment, data, space), lambda *_: None).start()
        RingWriter(loop, Outbox(RingProducer(segment, data, space))).start()
    await asyncio.sleep(0.5)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"wakes": (after.ru_nvcsw - before.ru_nvcsw) / seconds, "cpu": cpu / seconds}))

uvloop.run(main(float(sys.argv[1])))
"""


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_idle_rings_leave_the_process_asleep(seconds: int) -> None:
    """Six rings in each direction: their rescue timers share the loop's wake-ups."""
    result = subprocess.run([sys.executable, "-c", IDLE, str(seconds)], capture_output=True, text=True, check=True)
    outcome = json.loads(result.stdout)
    assert outcome["wakes"] < 10
    assert outcome["cpu"] < 0.01
