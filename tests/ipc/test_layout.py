"""The layout is an agreement between processes and between the two cores: pinned here number by number."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipc
from ipc import layout
from ipc.errors import LayoutError, RingPoisonedError
from ipc.host import boot_tag, start_ticks
from ipc.layout import RingSpec
from ipc.ring import PushResult
from ipc.segment import SharedSegment
from tests.ipc.rings import PAIRS, SMALL, Ring, open_ring

GOLDEN = {
    "OFF_MAGIC": 0,
    "OFF_LAYOUT_VERSION": 8,
    "OFF_HEADER_BYTES": 12,
    "OFF_CAPACITY": 16,
    "OFF_MAX_RECORD": 24,
    "OFF_FEATURES": 28,
    "OFF_RING_ID": 32,
    "OFF_BOOT_TAG": 40,
    "OFF_CREATOR_START": 48,
    "OFF_HEADER_CRC": 56,
    "OFF_TAIL": 128,
    "OFF_SENT_COUNT": 136,
    "OFF_PRODUCER_EPOCH": 144,
    "OFF_PRODUCER_PID": 152,
    "OFF_PRODUCER_FENCE": 156,
    "OFF_HEAD": 256,
    "OFF_RECV_COUNT": 264,
    "OFF_CONSUMER_EPOCH": 272,
    "OFF_CONSUMER_PID": 280,
    "OFF_CONSUMER_FENCE": 284,
    "OFF_CONSUMER_WAITING": 384,
    "OFF_PRODUCER_WAITING": 512,
    "OFF_PRODUCER_COUNTERS": 640,
    "OFF_CONSUMER_COUNTERS": 768,
    "OFF_STATE": 896,
}


def number(segment: SharedSegment, offset: int, width: int) -> int:
    return int.from_bytes(segment.buffer[offset : offset + width], "little")


def test_golden_offsets() -> None:
    assert {name: value for name, value in vars(layout).items() if name.startswith("OFF_")} == GOLDEN
    assert (layout.HEADER_BYTES, layout.RECORD_HEADER, layout.ALIGNMENT) == (4096, 16, 16)
    assert layout.MAGIC.to_bytes(8, "little") == b"TRDRING1"


def test_the_c_core_has_the_same_numbers() -> None:
    source = (Path(ipc.__file__).parent / "_ring_core.h").read_text()
    found = {name: int(value) for name, value in re.findall(r"RING_(OFF_\w+) = (\d+)", source)}
    assert len(found) > 15
    counters = {
        f"OFF_{counter.name}": layout.OFF_PRODUCER_COUNTERS + 8 * counter for counter in layout.ProducerCounter
    } | {f"OFF_{counter.name}": layout.OFF_CONSUMER_COUNTERS + 8 * counter for counter in layout.ConsumerCounter}
    assert found.items() <= (GOLDEN | counters).items()
    faults = {name: int(value) for name, value in re.findall(r"RING_FAULT_(\w+) = (\d+)", source)}
    assert faults == {fault.name: int(fault) for fault in layout.Fault}
    assert f"RING_STATE_CLOSED = {layout.State.CLOSED:d}" in source
    assert f"RING_STATE_POISONED = {layout.State.POISONED:d}" in source
    assert f"RING_FLAG_MORE = {layout.FLAG_MORE:#x}" in source


def test_header_as_written() -> None:
    segment = SharedSegment.create(SMALL)
    try:
        assert bytes(segment.buffer[:8]) == b"TRDRING1"
        assert [number(segment, offset, 4) for offset in (8, 12, 24, 28)] == [1, 4096, 1024, 3]
        assert [number(segment, offset, 8) for offset in (16, 32, 40)] == [4096, 1 << 32 | 2, boot_tag()]
        assert number(segment, 48, 8) == os.getpid() << 40 ^ (start_ticks(os.getpid()) or 0)
        assert number(segment, 56, 4) == zlib.crc32(segment.buffer[:56])
        assert number(segment, 896, 4) == layout.State.OPEN
        assert len(segment.buffer) == 4096 + 4096
    finally:
        segment.close()


def test_record_as_written(ring: Ring) -> None:
    ring.producer.try_push(b"first", 3)
    ring.producer.try_push(b"", 0xFFFF)
    data = ring.segment.buffer[4096:]
    # length, seq, check, kind, then epoch 1 in the low byte of the flags
    first = bytes.fromhex("05000000 00000000") + bytes.fromhex("0300 0100")
    assert bytes(data[:8]) + bytes(data[12:16]) == first
    assert int.from_bytes(data[8:12], "little") == zlib.crc32(first + b"first")
    assert bytes(data[16:21]) == b"first"
    assert bytes(data[32:40]) == bytes.fromhex("00000000 01000000")
    assert bytes(data[44:48]) == bytes.fromhex("ffff 0100")
    assert ring.segment.words[layout.OFF_TAIL // 8] == 48
    data.release()


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_each_core_reads_the_other(producer: str, consumer: str) -> None:
    sizes = [0, 1, 15, 16, 17, 1000, 1024, 1025, 3000, SMALL.max_message]
    with open_ring(producer=producer, consumer=consumer) as ring:
        for round_number in range(40):
            for kind, size in enumerate(sizes):
                payload = os.urandom(size)
                assert ring.producer.try_push(payload, kind + round_number) is PushResult.PUBLISHED
                assert ring.read_all() == [(kind + round_number, payload)]
        assert ring.producer.try_push_many([b"a", b"bc"], 5) == 2
        assert ring.read_all() == [(5, b"a"), (5, b"bc")]


@pytest.fixture
def written() -> Iterator[SharedSegment]:
    segment = SharedSegment.create(SMALL)
    yield segment
    segment.close()


@pytest.mark.parametrize(
    ("field", "offset"),
    [("magic", 0), ("layout_version", 8), ("header_bytes", 12), ("header_crc", 56)],
)
def test_attach_refuses_a_bad_field(written: SharedSegment, field: str, offset: int) -> None:
    written.buffer[offset] ^= 1
    with pytest.raises(LayoutError, match=field):
        SharedSegment.from_fd(written.fileno())


@pytest.mark.parametrize(
    ("field", "offset"), [("capacity", 17), ("max_record", 24), ("features", 31), ("boot_tag", 40), ("ring_id", 32)]
)
def test_attach_refuses_a_bad_field_under_a_good_checksum(written: SharedSegment, field: str, offset: int) -> None:
    written.buffer[offset] ^= 0x80
    written.halves[layout.OFF_HEADER_CRC // 4] = zlib.crc32(written.buffer[:56])
    if field == "ring_id":
        other = SharedSegment.from_fd(written.fileno())
        assert other.spec.ring_id == SMALL.ring_id ^ 0x80
        other.close()
    else:
        with pytest.raises(LayoutError, match=field):
            SharedSegment.from_fd(written.fileno())


def test_attach_refuses_a_file_that_is_too_short(tmp_path: Path) -> None:
    with (tmp_path / "short").open("wb+") as file:
        file.write(b"TRDRING1")
        file.flush()
        with pytest.raises(LayoutError, match="size"):
            SharedSegment.from_fd(file.fileno())


@pytest.mark.parametrize(("producer", "consumer"), [("c", "c"), ("python", "python")])
@pytest.mark.parametrize(("tail", "head"), [(16, 32), (8192, 0), (8, 0)])
def test_attach_refuses_impossible_cursors(producer: str, consumer: str, tail: int, head: int) -> None:
    with open_ring(producer=producer, consumer=consumer) as ring:
        ring.segment.words[layout.OFF_TAIL // 8] = tail
        ring.segment.words[layout.OFF_HEAD // 8] = head
        for restart in (ring.restart_producer, ring.restart_consumer):
            with pytest.raises(RingPoisonedError, match="1->2"):
                restart()
        assert ring.segment.state is layout.State.POISONED


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("capacity", {"capacity": 5000}),
        ("capacity", {"capacity": 2048, "max_record": 16}),
        ("max_record", {"capacity": 4096, "max_record": 2048}),
        ("max_record", {"capacity": 4096, "max_record": 1000}),
        ("max_record", {"capacity": 4096, "max_record": 0}),
        ("ring_id", {"ring_id": -1}),
    ],
)
def test_spec_refuses_sizes_that_do_not_fit(field: str, sizes: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match=field):
        RingSpec(**{"ring_id": 1, **sizes})
