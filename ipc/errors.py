"""What can go wrong with a ring. A full ring is not an error: see PushResult.FULL."""

from __future__ import annotations


class RingError(Exception):
    """Base of all errors of this package."""


class SegmentError(RingError):
    """Shared memory could not be created, opened or closed."""


class LayoutError(SegmentError):
    """The memory behind a file descriptor is not a ring that this version can use."""


class RoleTakenError(RingError):
    """Another living process already holds this end of the ring."""


class RingClosedError(RingError):
    """The supervisor closed the ring; nothing more can be sent."""


class RingPoisonedError(RingError):
    """The ring holds a record or a cursor that cannot be right; it must be replaced, not repaired."""


class MessageTooLargeError(RingError, ValueError):
    """The message can never fit into this ring, not even when it is empty."""


class UnsupportedMachineError(RingError):
    """The pure-Python ring is not correct on this type of machine."""
