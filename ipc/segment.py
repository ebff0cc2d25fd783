"""The shared memory of one ring: created by the supervisor, mapped by both ends through an inherited descriptor."""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import zlib
from typing import Self

import posix_ipc

from ipc import layout
from ipc.errors import LayoutError, SegmentError
from ipc.host import boot_id, boot_tag, start_ticks
from ipc.layout import ConsumerCounter, ProducerCounter, RingSpec, State, ring_name

NAME_PREFIX = "trouterd-"


class Backend(enum.Enum):
    """Where the pages come from."""

    SHM = "shm"
    """POSIX shared memory: limited by the size of /dev/shm, named for the moment between creation and unlink."""
    MEMFD = "memfd"
    """Anonymous and sealed against resizing: no name, not limited by /dev/shm."""


class SharedSegment:
    """One ring's header and data. Endpoints keep it mapped, so close them first.

    Each process maps it through a descriptor of its own (`from_fd`), because the locks that guard the two ends belong
    to the open file description: a description shared with the parent would outlive the process that locked it.
    """

    def __init__(self, fd: int, spec: RingSpec, name: str | None = None) -> None:
        self.spec = spec
        self.name = name
        self.attached: set[int] = set()
        """Roles that this process holds through this object."""
        self._fd = fd
        # Populated at once: faulting pages in later would cost the first messages milliseconds.
        self._map = mmap.mmap(fd, spec.segment_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.buffer = memoryview(self._map)
        self.words = self.buffer.cast("Q")
        self.halves = self.buffer.cast("I")

    @classmethod
    def create(cls, spec: RingSpec, *, unlink: bool = True, backend: Backend = Backend.SHM) -> Self:
        """A new, empty ring. SegmentError when there is no room; with `unlink=False` its name lives until close()."""
        fd, name = _create_shm(spec) if backend is Backend.SHM else _create_memfd(spec)
        try:
            _allocate(fd, spec)
            if backend is Backend.MEMFD:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            segment = cls(fd, spec, name)
        except (OSError, SegmentError):
            os.close(fd)
            if name is not None:
                posix_ipc.unlink_shared_memory(name)
            raise
        if unlink:
            segment._unlink()
        segment._write_header()
        return segment

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """Maps the ring behind an inherited descriptor, which stays open and is the caller's. LayoutError names the
        header field that does not fit."""
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(own, _read_spec(own))
        except (OSError, LayoutError):
            os.close(own)
            raise

    def fileno(self) -> int:
        """The segment's descriptor, for pass_fds or SCM_RIGHTS."""
        return self._fd

    @property
    def state(self) -> State:
        """What is allowed on the ring."""
        return State(self.halves[layout.OFF_STATE // 4])

    def advance(self, state: State) -> None:
        """Supervisor: raises the state. Lowering it is refused: a ring is replaced, never reopened."""
        if state < self.state:
            raise SegmentError(f"ring {ring_name(self.spec.ring_id)}: cannot go from {self.state.name} to {state.name}")
        self.halves[layout.OFF_STATE // 4] = state

    def stats(self) -> dict[str, int]:
        """Every counter and gauge of both ends, readable in any process that maps the segment."""
        words = self.words
        head, tail = words[layout.OFF_HEAD // 8], words[layout.OFF_TAIL // 8]
        stats = {
            "state": self.halves[layout.OFF_STATE // 4],
            "capacity_bytes": self.spec.capacity,
            # The two cursors are read one after the other, so the difference can be off while messages flow.
            "fill_bytes": min(max(tail - head, 0), self.spec.capacity),
            "sent": words[layout.OFF_SENT_COUNT // 8],
            "received": words[layout.OFF_RECV_COUNT // 8],
            "producer_epoch": words[layout.OFF_PRODUCER_EPOCH // 8],
            "consumer_epoch": words[layout.OFF_CONSUMER_EPOCH // 8],
            "producer_pid": self.halves[layout.OFF_PRODUCER_PID // 4],
            "consumer_pid": self.halves[layout.OFF_CONSUMER_PID // 4],
        }
        for producer_counter in ProducerCounter:
            stats[producer_counter.name.lower()] = words[layout.OFF_PRODUCER_COUNTERS // 8 + producer_counter]
        for consumer_counter in ConsumerCounter:
            stats[consumer_counter.name.lower()] = words[layout.OFF_CONSUMER_COUNTERS // 8 + consumer_counter]
        return stats

    def close(self) -> None:
        """Unmaps and closes. SegmentError while an endpoint of this process is still attached."""
        if self._fd < 0:
            return
        if self.attached:
            raise SegmentError(f"ring {ring_name(self.spec.ring_id)}: close its producer and its consumer first")
        self.words.release()
        self.halves.release()
        self.buffer.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1
        self._unlink()

    def _unlink(self) -> None:
        if self.name is not None:
            posix_ipc.unlink_shared_memory(self.name)
            self.name = None

    def _write_header(self) -> None:
        words, halves, spec = self.words, self.halves, self.spec
        pid = os.getpid()
        halves[layout.OFF_LAYOUT_VERSION // 4] = layout.LAYOUT_VERSION
        halves[layout.OFF_HEADER_BYTES // 4] = layout.HEADER_BYTES
        words[layout.OFF_CAPACITY // 8] = spec.capacity
        halves[layout.OFF_MAX_RECORD // 4] = spec.max_record
        halves[layout.OFF_FEATURES // 4] = spec.features
        words[layout.OFF_RING_ID // 8] = spec.ring_id
        words[layout.OFF_BOOT_TAG // 8] = boot_tag()
        words[layout.OFF_CREATOR_START // 8] = pid << 40 ^ (start_ticks(pid) or 0)
        halves[layout.OFF_STATE // 4] = State.OPEN
        magic = layout.MAGIC.to_bytes(8, "little")
        halves[layout.OFF_HEADER_CRC // 4] = zlib.crc32(magic + bytes(self.buffer[8 : layout.OFF_HEADER_CRC]))
        words[layout.OFF_MAGIC // 8] = layout.MAGIC


def _create_shm(spec: RingSpec) -> tuple[int, str]:
    pid = os.getpid()
    name = f"/{NAME_PREFIX}{boot_id()[:8]}-{pid}-{start_ticks(pid)}-{spec.ring_id:x}"
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.ExistentialError as error:
        raise SegmentError(f"ring {ring_name(spec.ring_id)}: the name {name} is in use by this process") from error
    # The mode is never wider than 0600; a umask could still have made it narrower.
    os.fchmod(memory.fd, 0o600)
    return memory.fd, name


def _create_memfd(spec: RingSpec) -> tuple[int, None]:
    fd = os.memfd_create(f"{NAME_PREFIX}{spec.ring_id:x}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    return fd, None


def _allocate(fd: int, spec: RingSpec) -> None:
    """Reserves every page now: on a full tmpfs a sparse file kills its first writer with SIGBUS."""
    try:
        os.posix_fallocate(fd, 0, spec.segment_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        room = os.fstatvfs(fd)
        raise SegmentError(
            f"ring {ring_name(spec.ring_id)}: needs {spec.segment_bytes} bytes of shared memory, "
            f"{room.f_bavail * room.f_frsize} are free: enlarge /dev/shm or make the rings smaller"
        ) from error


def _read_spec(fd: int) -> RingSpec:
    """Validates the header before anything is mapped or trusted."""
    header = os.pread(fd, layout.HEADER_BYTES, 0)
    size = os.fstat(fd).st_size
    if len(header) < layout.HEADER_BYTES:
        raise LayoutError(f"size: {size} bytes are too few for a ring")

    def field(offset: int, width: int) -> int:
        return int.from_bytes(header[offset : offset + width], "little")

    expected = [
        ("magic", layout.OFF_MAGIC, 8, layout.MAGIC),
        ("layout_version", layout.OFF_LAYOUT_VERSION, 4, layout.LAYOUT_VERSION),
        ("header_bytes", layout.OFF_HEADER_BYTES, 4, layout.HEADER_BYTES),
        ("header_crc", layout.OFF_HEADER_CRC, 4, zlib.crc32(header[: layout.OFF_HEADER_CRC])),
        ("boot_tag", layout.OFF_BOOT_TAG, 8, boot_tag()),
        ("capacity", layout.OFF_CAPACITY, 8, size - layout.HEADER_BYTES),
    ]
    for name, offset, width, want in expected:
        if (found := field(offset, width)) != want:
            raise LayoutError(f"{name}: found {found:#x}, expected {want:#x}")
    features = field(layout.OFF_FEATURES, 4)
    if features & ~layout.KNOWN_FEATURES or not features & layout.FEATURE_FRAGMENTS:
        raise LayoutError(f"features: {features:#x} are not those of this version ({layout.KNOWN_FEATURES:#x})")
    return RingSpec(
        ring_id=field(layout.OFF_RING_ID, 8),
        capacity=field(layout.OFF_CAPACITY, 8),
        max_record=field(layout.OFF_MAX_RECORD, 4),
        checksum=bool(features & layout.FEATURE_CHECKSUM),
    )
