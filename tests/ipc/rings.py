"""A ring with both ends in one process."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from ipc import layout
from ipc.core import Core, load_core
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.ring import RingConsumer, RingProducer
from ipc.segment import SharedSegment

SMALL = RingSpec(ring_id=1 << 32 | 2, capacity=4096, max_record=1024, checksum=True)
CORES = ("c", "python")
PAIRS = (("c", "c"), ("python", "python"), ("c", "python"), ("python", "c"))


def core(name: str) -> Core:
    """The core called `name`; skips where the C core was not built."""
    try:
        return load_core(name)
    except ImportError:
        pytest.skip("ipc._ring is not built: python setup.py build_ext --inplace")


def load_variant(path: Path) -> Core:
    """An extension module that tests/ipc/build.py compiled."""
    loader = importlib.machinery.ExtensionFileLoader("ipc._ring", str(path))
    spec = importlib.util.spec_from_loader("ipc._ring", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return cast(Core, module)


class Ring:
    """Both ends of one ring; the consumer maps the memory a second time, as another process would."""

    def __init__(self, spec: RingSpec = SMALL, producer: str = "c", consumer: str = "c", start: int = 0) -> None:
        self.segment = SharedSegment.create(spec)
        self.segment.words[layout.OFF_TAIL // 8] = self.segment.words[layout.OFF_HEAD // 8] = start
        self.mapped = SharedSegment.from_fd(self.segment.fileno())
        self.data, self.space = create_event(), create_event()
        self.cores = core(producer), core(consumer)
        self.producer = RingProducer(self.segment, self.data, self.space, core=self.cores[0])
        self.consumer = RingConsumer(self.mapped, self.data, self.space, core=self.cores[1])
        self.clear_events()

    def clear_events(self) -> None:
        """As if both ends had just woken up."""
        for event in (self.data, self.space):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(event)

    def restart_producer(self) -> None:
        """The producer's process was replaced."""
        self.producer.close()
        self.producer = RingProducer(self.segment, self.data, self.space, core=self.cores[0])

    def restart_consumer(self) -> None:
        """The consumer's process was replaced."""
        self.consumer.close()
        self.consumer = RingConsumer(self.mapped, self.data, self.space, core=self.cores[1])

    def read(self, **limits: int) -> list[tuple[int, bytes]]:
        """One batch."""
        got: list[tuple[int, bytes]] = []
        self.consumer.poll(lambda kind, view: got.append((kind, bytes(view))), **limits)
        return got

    def read_all(self) -> list[tuple[int, bytes]]:
        """Everything there is."""
        got = []
        while batch := self.read():
            got += batch
        return got

    def close(self) -> None:
        """Frees everything."""
        self.producer.close()
        self.consumer.close()
        self.mapped.close()
        self.segment.close()
        os.close(self.data)
        os.close(self.space)


@contextlib.contextmanager
def open_ring(spec: RingSpec = SMALL, producer: str = "c", consumer: str = "c", start: int = 0) -> Iterator[Ring]:
    """A ring for the length of a with block."""
    ring = Ring(spec, producer, consumer, start)
    try:
        yield ring
    finally:
        ring.close()


def readable(event: int) -> bool:
    """Whether the eventfd is set; clears it."""
    try:
        return os.eventfd_read(event) > 0
    except BlockingIOError:
        return False
