"""python -m tests.ipc.hammer CORE SLEEPS: single messages at random distances between two processes, to make the
consumer go to sleep as often as possible while the producer publishes. Prints counts as JSON."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys

from ipc.core import load_core
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.ring import RingConsumer, RingProducer
from ipc.segment import SharedSegment

WAIT = 10_000  # ms


def produce(segment: SharedSegment, data: int, core: str) -> None:
    """Pushes until killed."""
    producer = RingProducer(segment, data, core=load_core(core))
    choose = random.Random(1)
    pauses = [range(choose.randrange(60)) for _ in range(1024)]
    number = 0
    while True:
        number += producer.try_push(b"12345678", 1) > 0
        for _ in pauses[number & 1023]:
            pass
        if not number & 7:
            # On a busy host both may share a core, and a producer that never yields is a wake every few milliseconds.
            os.sched_yield()


def consume(consumer: RingConsumer, data: int, sleeps: int) -> dict[str, int]:
    """Sleeps and wakes; a wake that does not come within two waits is lost."""
    counts = {"sleeps": 0, "late": 0, "lost": 0}
    wait = select.poll()
    wait.register(data, select.POLLIN)
    while counts["sleeps"] < sleeps:
        if consumer.poll(lambda *_: None) or not consumer.prepare_wait():
            continue
        counts["sleeps"] += 1
        for outcome in ("late", "lost"):
            if wait.poll(WAIT) or not consumer.pending:
                break
            counts[outcome] += 1
        if wait.poll(0):
            os.eventfd_read(data)
    return counts


def main() -> None:
    """Forks the producer."""
    core, sleeps = sys.argv[1], int(sys.argv[2])
    segment = SharedSegment.create(RingSpec(ring_id=1, capacity=1 << 16, max_record=1 << 12))
    data = create_event()
    consumer = RingConsumer(SharedSegment.from_fd(segment.fileno()), data, core=load_core(core))
    child = os.fork()
    if not child:
        produce(SharedSegment.from_fd(segment.fileno()), data, core)
    try:
        json.dump(consume(consumer, data, sleeps), sys.stdout)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
