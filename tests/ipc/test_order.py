"""The order and the wholeness of shared stores."""

from __future__ import annotations

import ast
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ipc
from ipc import fallback, layout
from ipc.fallback import Slots
from ipc.ring import PushResult
from ipc.segment import SharedSegment
from tests.ipc.rings import SMALL

TAIL, HEAD, FLAG = layout.OFF_TAIL // 8, layout.OFF_HEAD // 8, layout.OFF_CONSUMER_WAITING // 8
Event = tuple[str, int]


class Recorder:
    """Memory of one item size that notes in which order it is touched, by byte offset."""

    def __init__(self, memory: memoryview, size: int, log: list[Event]) -> None:
        self.memory, self.size, self.log = memory, size, log

    def _note(self, what: str, index: int | slice) -> None:
        start = index.start if isinstance(index, slice) else index
        self.log.append((what, start * self.size))

    def __getitem__(self, index):
        self._note("load", index)
        return self.memory[index]

    def __setitem__(self, index, value) -> None:
        self._note("store", index)
        self.memory[index] = value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch):
    log: list[Event] = []

    def open_recorded(memory: memoryview) -> Slots:
        views = [memory.cast(code) for code in "QIB"]
        return Slots(*(Recorder(view, view.itemsize, log) for view in views))

    monkeypatch.setattr(fallback, "open_slots", open_recorded)
    segment = SharedSegment.create(SMALL)
    producer = fallback.Producer(segment.buffer, os.eventfd(0))
    consumer = fallback.Consumer(segment.buffer, -1)
    return producer, consumer, log


def data(event: Event) -> bool:
    return event[1] >= layout.HEADER_BYTES


@pytest.mark.parametrize("size", [24, 1024, 2000])
def test_tail_is_stored_after_the_record_and_before_the_flag_is_read(recorded, size: int) -> None:
    producer, _, log = recorded
    for _ in range(2):
        log.clear()
        assert producer.push(bytes(size), 1) == PushResult.PUBLISHED
        assert log.count(("store", 8 * TAIL)) == 1
        before = log[: log.index(("store", 8 * TAIL))]
        after = log[log.index(("store", 8 * TAIL)) :]
        assert sum(data(event) for event in before) >= 5
        assert not any(data(event) for event in after)
        assert ("load", 8 * FLAG) in after
        assert ("load", 8 * FLAG) not in before


def test_head_is_stored_after_the_last_read(recorded) -> None:
    producer, consumer, log = recorded
    for size in (24, 0, 100):
        producer.push(bytes(size), 1)
    log.clear()
    assert consumer.poll(lambda *_: None, 64, 1 << 18) == 3
    assert log.index(("load", 8 * TAIL)) < min(log.index(event) for event in log if data(event))
    assert log.count(("store", 8 * HEAD)) == 1
    assert not any(data(event) for event in log[log.index(("store", 8 * HEAD)) :])


def test_tail_is_read_again_after_the_announcement(recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    _, consumer, log = recorded
    monkeypatch.setattr(fallback, "_sleep_fence", lambda: log.append(("fence", 0)))
    log.clear()
    assert consumer.prepare_wait()
    assert log.index(("store", 8 * FLAG)) < log.index(("fence", 0)) < log.index(("load", 8 * TAIL))


def test_the_flag_is_taken_back_before_the_event_is_written(recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer, log = recorded
    monkeypatch.setattr(fallback.os, "eventfd_write", lambda *_: log.append(("event", 0)))
    consumer.prepare_wait()
    log.clear()
    assert producer.push(b"x", 1) is PushResult.PUBLISHED_WOKE.value
    assert log.index(("store", 8 * TAIL)) < log.index(("store", 8 * FLAG)) < log.index(("event", 0))


WRITER = """
import mmap, struct, sys
memory = memoryview(mmap.mmap(int(sys.argv[1]), 4096))
words = memory.cast("Q")
while not words[8]:
    for value in (0xFFFFFFFFFFFFFFFF, 0x0123456789ABCDEF) * 50:
        STORE
"""
VALUES = (0xFFFFFFFFFFFFFFFF, 0x0123456789ABCDEF)


def torn_reads(store: str, enough: Callable[[int, int, set[int]], bool]) -> tuple[int, set[int]]:
    """Reads of a word that were neither of the two values that another process stores, and the values seen."""
    fd = os.memfd_create("torn")
    os.ftruncate(fd, 4096)
    words = memoryview(mmap.mmap(fd, 4096)).cast("Q")
    words[0] = VALUES[0]
    command = [sys.executable, "-c", WRITER.replace("STORE", store), str(fd)]
    with subprocess.Popen(command, pass_fds=[fd]) as writer:
        torn = reads = 0
        seen: set[int] = set()
        while not enough(torn, reads, seen) and writer.poll() is None:
            for _ in range(1000):
                value = words[0]
                if value not in VALUES:
                    torn += 1
                seen.add(value)
            reads += 1000
        words[8] = 1
    os.close(fd)
    assert writer.returncode == 0
    return torn, seen


def both_seen(count: int) -> Callable[[int, int, set[int]], bool]:
    return lambda _, reads, seen: reads >= count and seen.issuperset(VALUES)


@pytest.mark.parametrize("count", [200_000, pytest.param(5_000_000, marks=pytest.mark.slow)])
def test_slot_stores_are_whole(count: int) -> None:
    torn, seen = torn_reads("words[0] = value", both_seen(count))
    assert torn == 0
    assert seen == set(VALUES)


def test_pack_into_is_not_whole_and_this_test_sees_it() -> None:
    torn, _ = torn_reads('struct.pack_into("<Q", memory, 0, value)', lambda torn, reads, _: torn > 0 or reads > 20e6)
    assert torn > 0


def test_pack_into_is_banned_from_the_package() -> None:
    files = list(Path(ipc.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name != "pack_into", f"{path.name}:{node.lineno}: struct.pack_into clears a field before it sets it"
