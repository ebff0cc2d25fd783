"""Eventfds for wake-ups: one per direction of a ring, created by the supervisor and inherited by both ends."""

from __future__ import annotations

import os


def create_event() -> int:
    """A non-blocking, close-on-exec eventfd: writing it never waits, and reading it clears it."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
