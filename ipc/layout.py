"""Where every word of a ring lies. docs/ipc.md explains the layout; tests/ipc/test_layout.py pins it.

All integers are little-endian and naturally aligned. Groups with different writers are 128 bytes apart, because x86
fetches cache lines in pairs. `_ring_core.h` holds the same numbers for the C core.
"""

from __future__ import annotations

import enum

import msgspec

from ipc.errors import LayoutError

MAGIC = int.from_bytes(b"TRDRING1", "little")
LAYOUT_VERSION = 1
HEADER_BYTES = 4096
RECORD_HEADER = 16
ALIGNMENT = 16

# Written by the creator, never changed afterwards.
OFF_MAGIC = 0
OFF_LAYOUT_VERSION = 8
OFF_HEADER_BYTES = 12
OFF_CAPACITY = 16
OFF_MAX_RECORD = 24
OFF_FEATURES = 28
OFF_RING_ID = 32
OFF_BOOT_TAG = 40
OFF_CREATOR_START = 48
OFF_HEADER_CRC = 56
# Written by the producer.
OFF_TAIL = 128
OFF_SENT_COUNT = 136
OFF_PRODUCER_EPOCH = 144
OFF_PRODUCER_PID = 152
OFF_PRODUCER_FENCE = 156
# Written by the consumer.
OFF_HEAD = 256
OFF_RECV_COUNT = 264
OFF_CONSUMER_EPOCH = 272
OFF_CONSUMER_PID = 280
OFF_CONSUMER_FENCE = 284
# Written by both.
OFF_CONSUMER_WAITING = 384
OFF_PRODUCER_WAITING = 512
# Counters, eight words each.
OFF_PRODUCER_COUNTERS = 640
OFF_CONSUMER_COUNTERS = 768
# Written by the supervisor, and by whoever finds the ring broken.
OFF_STATE = 896

FEATURE_CHECKSUM = 1
FEATURE_FRAGMENTS = 2
KNOWN_FEATURES = FEATURE_CHECKSUM | FEATURE_FRAGMENTS

PADDING = 1 << 31
FLAG_MORE = 0x100
EPOCH_MASK = 0xFF
MAX_KIND = 0xFFFF


class State(enum.IntEnum):
    """What the supervisor allows on a ring. It only ever rises."""

    OPEN = 1
    DRAINING = 2
    """The daemon is stopping: messages of running requests still pass, owners start nothing new."""
    CLOSED = 3
    """Pushing is refused; what is in the ring can still be read."""
    POISONED = 4
    """Pushing and reading are refused; see RingPoisonedError."""


class Fault(enum.IntEnum):
    """Why a consumer gave a ring up."""

    CURSOR = 1
    LENGTH = 2
    SEQ = 3
    CHECK = 4
    PADDING = 5
    FRAGMENT = 6
    MEMORY = 7
    STATE = 8


FAULT_TEXT = {
    Fault.CURSOR: "the producer's cursor is impossible",
    Fault.LENGTH: "a record reaches beyond what was published",
    Fault.SEQ: "a record does not carry the next sequence number",
    Fault.CHECK: "a checksum does not match",
    Fault.PADDING: "padding does not end where the buffer ends",
    Fault.FRAGMENT: "the fragments of a message do not belong together",
    Fault.MEMORY: "there is no memory for a fragmented message",
    Fault.STATE: "the other end found it broken",
}


class ProducerCounter(enum.IntEnum):
    """Words of the producer's counter block, in order. All but the two spill gauges only rise."""

    FULL_EVENTS = 0
    WAKES_SENT = 1
    SPILL_RECORDS = 2
    SPILL_BYTES = 3
    REJECTED = 4
    KICKS = 5
    SPACE_WAKES = 6
    SPACE_RESCUES = 7


class ConsumerCounter(enum.IntEnum):
    """Words of the consumer's counter block, in order. All only rise."""

    WAKES_RECEIVED = 0
    EMPTY_WAKES = 1
    BAD_RECORDS = 2
    BATCHES = 3
    RESCUES = 4
    SPACE_WAKES_SENT = 5
    STALE_RECORDS = 6
    SPIN_HITS = 7


class RingSpec(msgspec.Struct, frozen=True):
    """What a ring is created with. Sizes in bytes; raises LayoutError for sizes that the layout cannot hold."""

    ring_id: int
    """Source index << 32 | destination index."""
    capacity: int = 1 << 20
    """Size of the data area, a power of two."""
    max_record: int = 1 << 18
    """Largest payload of one record, a multiple of 16; longer messages are sent in fragments."""
    checksum: bool = False
    """CRC-32 over every record: finds wild writes, costs about 1 ns per 2 bytes at each end."""

    def __post_init__(self) -> None:
        if not 0 <= self.ring_id < 1 << 64:
            raise LayoutError(f"ring_id: {self.ring_id} is not an unsigned 64-bit number")
        if self.capacity < 4096 or self.capacity & (self.capacity - 1) or self.capacity > 1 << 40:
            raise LayoutError(f"capacity: {self.capacity} is not a power of two from 4096 to 2**40")
        limit = min(self.capacity // 4, PADDING // 2)
        if not ALIGNMENT <= self.max_record <= limit or self.max_record % ALIGNMENT:
            raise LayoutError(f"max_record: {self.max_record} is not a multiple of 16 from 16 to {limit}")

    @property
    def max_message(self) -> int:
        """Largest message, in bytes, that an empty ring takes at any position of its cursors."""
        return self.capacity - RECORD_HEADER * (self.capacity // self.max_record + 2)

    @property
    def features(self) -> int:
        """Feature bits for the header."""
        return FEATURE_FRAGMENTS | (FEATURE_CHECKSUM if self.checksum else 0)

    @property
    def segment_bytes(self) -> int:
        """Size of the whole segment."""
        return HEADER_BYTES + self.capacity


def ring_name(ring_id: int) -> str:
    """`source->destination`, for messages to people."""
    return f"{ring_id >> 32}->{ring_id & 0xFFFFFFFF}"


def aligned(size: int) -> int:
    """Bytes that a payload of `size` bytes takes in the ring, without its header."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT
