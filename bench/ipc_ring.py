"""The ring under measurement: an uvloop reader at each end, in the arrangement that the daemon uses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Callable

import uvloop

from ipc.core import load_core
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.reader import RingReader
from ipc.ring import PushResult, RingConsumer, RingProducer
from ipc.segment import SharedSegment

KIND = 1


class RingPair:
    """Two rings between this process and its fork. Events are made before the fork, the ends after it."""

    def __init__(self, core: str, spin_us: int) -> None:
        self.core = load_core(core)
        self.spin_us = spin_us
        self.segments = [SharedSegment.create(RingSpec(ring_id=number)) for number in (1, 2)]
        self.events = [(create_event(), create_event()) for _ in self.segments]

    def _producer(self, ring: int) -> RingProducer:
        segment = SharedSegment.from_fd(self.segments[ring].fileno())
        return RingProducer(segment, *self.events[ring], core=self.core)

    def _consumer(self, ring: int) -> RingConsumer:
        segment = SharedSegment.from_fd(self.segments[ring].fileno())
        return RingConsumer(segment, *self.events[ring], core=self.core)

    def wakes(self) -> int:
        """Wakes sent by both ends."""
        return sum(segment.stats()["wakes_sent"] for segment in self.segments)

    def echo(self, count: int) -> None:
        """The far end: every message goes back."""

        async def main() -> None:
            done = asyncio.Event()
            producer = self._producer(1)
            left = count

            def answer(kind: int, view: memoryview) -> None:
                nonlocal left
                producer.try_push(view, kind)
                left -= 1
                if not left:
                    done.set()

            reader = RingReader(asyncio.get_running_loop(), self._consumer(0), answer, spin_us=self.spin_us)
            reader.start()
            await done.wait()
            await reader.aclose()

        uvloop.run(main())

    def ping(self, payload: bytes, count: int) -> list[int]:
        """The near end: round-trip times in ns."""

        async def main() -> list[int]:
            done = asyncio.Event()
            producer, times, sent = self._producer(0), [], 0

            def answered(kind: int, _: memoryview) -> None:
                nonlocal sent
                now = time.perf_counter_ns()
                times.append(now - sent)
                if len(times) == count:
                    done.set()
                    return
                sent = time.perf_counter_ns()
                producer.try_push(payload, kind)

            reader = RingReader(asyncio.get_running_loop(), self._consumer(1), answered, spin_us=self.spin_us)
            reader.start()
            sent = time.perf_counter_ns()
            producer.try_push(payload, KIND)
            await done.wait()
            await reader.aclose()
            return times

        return uvloop.run(main())

    def receive(self, count: int, ready: Callable[[], object]) -> None:
        """The far end: counts messages in place and says when it has them all."""

        async def main() -> None:
            done = asyncio.Event()
            left = count

            def take(_: int, __: memoryview) -> None:
                nonlocal left
                left -= 1
                if not left:
                    done.set()

            reader = RingReader(asyncio.get_running_loop(), self._consumer(0), take, spin_us=self.spin_us)
            reader.start()
            ready()
            await done.wait()
            await reader.aclose()

        uvloop.run(main())
        self._producer(1).try_push(b"", KIND)

    def send(self, payload: bytes, count: int, wait_ready: Callable[[], object]) -> int:
        """The near end: sends, waiting only when the ring is full, until the far end has everything; ns."""
        producer, space = self._producer(0), self.events[0][1]
        wait = select.poll()
        wait.register(space, select.POLLIN)
        push, full = producer.try_push, PushResult.FULL
        wait_ready()
        start = time.perf_counter_ns()
        for _ in range(count):
            while push(payload, KIND) is full:
                if producer.prepare_wait(len(payload)):
                    wait.poll()
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(space)
        answer = select.poll()
        answer.register(self.events[1][0], select.POLLIN)
        consumer = self._consumer(1)
        while not consumer.poll(lambda *_: None):
            if consumer.prepare_wait():
                answer.poll()
        return time.perf_counter_ns() - start


def push_ns(size: int, count: int) -> float:
    """Nanoseconds per try_push with no consumer asleep, loop included."""
    segment, data = SharedSegment.create(RingSpec(ring_id=1)), create_event()
    producer, consumer = RingProducer(segment, data), RingConsumer(segment, data)
    payload, push = b"x" * size, producer.try_push
    batch = min(count, segment.spec.capacity // (size + 32))
    spent = done = 0
    while done < count:
        start = time.perf_counter_ns()
        for _ in range(batch):
            push(payload, KIND)
        spent += time.perf_counter_ns() - start
        done += batch
        while consumer.poll(lambda *_: None):
            pass
    return spent / done
