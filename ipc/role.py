"""The right to one end of a ring, held by at most one living process."""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct

from ipc import layout
from ipc.errors import RoleTakenError
from ipc.layout import ring_name
from ipc.segment import SharedSegment

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid (must be 0 here)


class Role(enum.Enum):
    """An end of a ring; the value is the offset of its cursor, whose byte range in the file is what gets locked."""

    PRODUCER = layout.OFF_TAIL
    CONSUMER = layout.OFF_HEAD


class RoleLock:
    """An open-file-description lock: the kernel drops it when its process dies, however it dies."""

    def __init__(self, segment: SharedSegment, role: Role) -> None:
        self._segment = segment
        self._role = role
        try:
            # The kernel lets one description lock the same range twice, so this process is checked apart.
            if role.value in segment.attached:
                raise BlockingIOError(errno.EAGAIN, "held by this process")
            self._set(fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError) as error:
            pid_offset = layout.OFF_PRODUCER_PID if role is Role.PRODUCER else layout.OFF_CONSUMER_PID
            raise RoleTakenError(
                f"ring {ring_name(segment.spec.ring_id)} already has a {role.name.lower()}: "
                f"process {segment.halves[pid_offset // 4]}"
            ) from error
        segment.attached.add(role.value)

    def release(self) -> None:
        """Gives the end up."""
        if self._role.value in self._segment.attached:
            self._segment.attached.remove(self._role.value)
            self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> None:
        flock = struct.pack(_FLOCK, kind, os.SEEK_SET, self._role.value, 1, 0)
        fcntl.fcntl(self._segment.fileno(), fcntl.F_OFD_SETLK, flock)
