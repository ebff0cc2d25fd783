"""SIGTERM for commands that start a daemon: they end as by Ctrl-C, so that the daemon and their temporary files go with them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the main thread inside the block, where it would otherwise end the process on the spot."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    # Raised, not passed on as SIGINT: a shell's background commands ignore that one.
    del number, frame
    raise Terminated
