"""Wrong bytes in the ring: detected with the checksum, never a crash or a read outside the ring without it."""

from __future__ import annotations

import random
import struct
import subprocess

import pytest

from ipc import layout
from ipc.errors import RingPoisonedError
from ipc.layout import RingSpec, State
from tests.ipc.build import driver
from tests.ipc.rings import CORES, Ring, open_ring

DATA = layout.HEADER_BYTES
HEADER_BITS = range(8 * layout.RECORD_HEADER)
BODY = bytes(range(100))


def read_until_poisoned(ring: Ring) -> list[tuple[int, bytes]]:
    got: list[tuple[int, bytes]] = []
    try:
        while ring.consumer.poll(lambda kind, view: got.append((kind, bytes(view)))):
            pass
    except RingPoisonedError:
        return got
    raise AssertionError("the damage was not noticed")


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("place", ["first", "second", "padding", "fragment"])
def test_every_flipped_header_bit_is_detected(name: str, place: str) -> None:
    """The messages before the damage arrive, none behind it does."""
    for bit in HEADER_BITS:
        start = 4096 - 128 if place == "padding" else 0
        with open_ring(producer=name, consumer=name, start=start) as ring:
            ring.producer.try_push(b"x", 1)
            ring.producer.try_push(BODY if place != "fragment" else BODY * 15, 2)
            at = {"first": start, "second": 32, "padding": start + 32, "fragment": 32 + 1040}[place] % 4096
            ring.segment.buffer[DATA + at + bit // 8] ^= 1 << bit % 8
            assert len(read_until_poisoned(ring)) == (place != "first")
            stats = ring.segment.stats()
            assert (stats["bad_records"], stats["state"]) == (1, State.POISONED)
            with pytest.raises(RingPoisonedError):
                ring.producer.try_push(b"y", 1)
            with pytest.raises(RingPoisonedError, match="replaced"):
                ring.consumer.poll(lambda *_: None)
            assert ring.consumer.prepare_wait() is False


@pytest.mark.parametrize("name", CORES)
def test_every_flipped_payload_bit_is_detected(name: str) -> None:
    for bit in range(0, 8 * len(BODY), 3):
        with open_ring(producer=name, consumer=name) as ring:
            ring.producer.try_push(BODY, 2)
            ring.segment.buffer[DATA + 16 + bit // 8] ^= 1 << bit % 8
            assert read_until_poisoned(ring) == []


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("bit", range(64))
def test_a_wild_tail_gives_no_wrong_message(name: str, bit: int) -> None:
    with open_ring(producer=name, consumer=name, start=1 << 20) as ring:
        ring.producer.try_push(BODY, 1)
        ring.read_all()
        ring.producer.try_push(BODY, 2)
        ring.segment.words[layout.OFF_TAIL // 8] ^= 1 << bit
        tail = ring.segment.words[layout.OFF_TAIL // 8]
        if tail == ring.consumer.position:
            assert ring.read_all() == []
        else:
            assert read_until_poisoned(ring) in ([], [(2, BODY)])


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("bit", range(64))
def test_an_impossible_head_is_detected(name: str, bit: int) -> None:
    with open_ring(producer=name, consumer=name, start=1 << 20) as ring:
        ring.producer.try_push(BODY, 1)
        ring.read_all()
        assert ring.producer.free_bytes == 4096
        ring.producer.try_push(BODY, 2)
        ring.segment.words[layout.OFF_HEAD // 8] ^= 1 << bit
        used = (1 << 20) + 256 - ring.segment.words[layout.OFF_HEAD // 8]
        possible = 0 <= used <= 128 and used % 16 == 0
        assert ring.producer.free_bytes == (4096 - used if possible else 0)
        assert (ring.segment.state is State.POISONED) is not possible


@pytest.mark.parametrize("pair", [("c", "c"), ("python", "python")])
def test_without_a_checksum_damage_never_crashes(pair: tuple[str, str]) -> None:
    """Random damage anywhere in the published bytes: wrong messages may come out, but none longer than the ring."""
    spec = RingSpec(ring_id=1, capacity=4096, max_record=1024, checksum=False)
    choose = random.Random(1)
    poisoned = 0
    for _ in range(400):
        with open_ring(spec, *pair, start=16 * choose.randrange(256)) as ring:
            while ring.producer.try_push(bytes(choose.randrange(1500)), 2):
                pass
            for _ in range(choose.randrange(1, 4)):
                ring.segment.buffer[DATA + choose.randrange(4096)] ^= 1 << choose.randrange(8)
            try:
                while messages := ring.read():
                    assert all(len(body) <= spec.max_message for _, body in messages)
            except RingPoisonedError:
                poisoned += 1
    assert 0 < poisoned < 400


@pytest.mark.parametrize("name", CORES)
def test_a_sequence_number_may_start_again_only_with_a_new_producer(name: str) -> None:
    with open_ring(RingSpec(ring_id=1, capacity=4096, max_record=1024), producer=name, consumer=name) as ring:
        for _ in range(3):
            ring.producer.try_push(b"", 1)
        ring.segment.halves[(DATA + 32) // 4 + 1] = 0
        assert len(read_until_poisoned(ring)) == 2


@pytest.mark.parametrize("name", CORES)
def test_fragments_that_do_not_belong_together(name: str) -> None:
    spec = RingSpec(ring_id=1, capacity=4096, max_record=64)
    for kind, flags in ((9, 0), (1, layout.FLAG_MORE)):
        with open_ring(spec, producer=name, consumer=name) as ring:
            ring.producer.try_push(bytes(128), 1)
            tag = struct.unpack_from("<HH", ring.segment.buffer, DATA + 80 + 12)
            assert tag == (1, 1)
            ring.segment.halves[(DATA + 80) // 4 + 3] = kind | (flags | 1) << 16
            assert read_until_poisoned(ring) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damage_never_makes_the_c_core_read_outside_the_ring(rounds: int) -> None:
    program = driver("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    result = subprocess.run([program, "damage", str(rounds)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    counts = dict(item.split("=") for item in result.stdout.split())
    assert int(counts["lost"]) > rounds // 10  # rounds in which the damage was noticed
