"""Models that take turns: one of them at a time has the whole GPU."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TURN, _QUEUE = 0, 1
"""Bytes of the lock file: whose turn it is, and who gets the next one."""
PATIENCE = 1.0
"""Seconds after which a worker that waits for its turn looks again, although it is told."""


class TurnError(RuntimeError):
    """The file of turns cannot be locked any more: steps would run side by side, or never again, so the worker has to end."""


class Turn:
    """One worker's hold on the turn that the workers of a daemon share.

    Whoever waits for the turn holds the queue, so that a worker that has just had a turn cannot take the next one before it. Both
    are record locks of one file: the system frees them when a process ends, however it ends.

    Args:
        path: the file, the same for all workers; made if it is not there.
        granted: called in the running event loop when a turn that had to be waited for has come, or cannot come any more.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, granted: Callable[[], None]) -> None:
        self._path = path
        self._file = _open(path)
        self._loop = asyncio.get_running_loop()
        self._granted = granted
        self._waits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Waits to be made, each with whether the queue is held already."""
        self._waiting = False
        self._fault: TurnError | None = None
        """Why the turn that is waited for cannot come."""
        self.held = False
        self.used = False
        """A step was launched in this turn, or is about to be."""
        # No part of an executor, whose end would wait for it.
        threading.Thread(target=self._wait, name="turn", daemon=True).start()

    def take(self) -> bool:
        """Whether it is this worker's turn, to be used; if not, it waits for it from now on.

        Raises:
            TurnError: the file cannot be locked.
        """
        if self._fault is not None:
            raise self._fault
        if not self.held and not self._waiting:
            queued = self._lock(_QUEUE)
            if queued and self._lock(_TURN):
                self._unlock(_QUEUE)
                self.held = True
            else:
                self._waiting = True
                self._waits.put(queued)
        self.used = self.held
        return self.held

    def wanted(self) -> bool:
        """Whether it is not this worker's turn, or another one waits for it. Raises TurnError."""
        # A worker without the turn may be in the queue, and would leave it by looking there.
        if not self.held or not self._lock(_QUEUE):
            return True
        self._unlock(_QUEUE)
        return False

    def give_back(self) -> None:
        """The steps have ended, and what they decided is on its way to the others. Raises TurnError."""
        self.held = self.used = False
        self._unlock(_TURN)

    def _wait(self) -> None:
        fault = None
        while fault is None:
            queued = self._waits.get()
            try:
                if not queued:
                    self._lockf(fcntl.LOCK_EX, _QUEUE)
                self._lockf(fcntl.LOCK_EX, _TURN)
                self._unlock(_QUEUE)
            except TurnError as error:
                fault = error
            with suppress(RuntimeError):  # the loop has ended, and the process is about to
                self._loop.call_soon_threadsafe(self._has_come, fault)

    def _has_come(self, fault: TurnError | None) -> None:
        self.held, self._waiting, self._fault = fault is None, False, fault
        self._granted()

    def _lock(self, byte: int) -> bool:
        try:
            self._lockf(fcntl.LOCK_EX | fcntl.LOCK_NB, byte)
        except BlockingIOError:
            return False
        return True

    def _unlock(self, byte: int) -> None:
        self._lockf(fcntl.LOCK_UN, byte)

    def _lockf(self, operation: int, byte: int) -> None:
        try:
            fcntl.lockf(self._file, operation, 1, byte)
        except BlockingIOError:
            raise
        except OSError as error:
            raise TurnError(f"batching.overlap: cannot lock {self._path} any more: {error.strerror}") from error


@contextmanager
def whole_turn(path: Path) -> Iterator[None]:
    """The turn, waited for in this thread and kept for the block: a worker that starts has steps to run, too.

    Args:
        path: as of `Turn`, which this process must not have yet: the system frees all its locks of a file with any of them.

    Raises:
        TurnError: the file cannot be opened or locked.
    """
    try:
        file = _open(path)
    except OSError as error:
        raise TurnError(f"batching.overlap: cannot open {path}: {error.strerror}") from error
    try:
        try:
            for byte in (_QUEUE, _TURN):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _QUEUE)
        except OSError as error:
            raise TurnError(f"batching.overlap: cannot lock {path}: {error.strerror}") from error
        yield
    finally:
        os.close(file)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Turns:
    """Whether a worker waits for its turn: a live setting, in force from one step to the next.

    Args:
        granted: called in the running event loop when a turn has come, or cannot come any more.
    """

    def __init__(self, granted: Callable[[], None]) -> None:
        self._granted = granted
        self._turn: Turn | None = None
        self.taken = False
        """Steps are launched while no other worker's run."""

    def configure(self, path: Path | None) -> None:
        """From now on launch a step only while no other worker of the daemon runs one.

        Args:
            path: the lock file that the workers share; None: launch freely.

        Raises:
            OSError: it cannot be opened; nothing has changed then.
        """
        if path is not None and self._turn is None:
            self._turn = Turn(path, self._granted)
        self.taken = path is not None

    def take(self) -> bool:
        """Whether it is this worker's turn, to be used; see `Turn.take`."""
        return self._turn is not None and self._turn.take()

    def wanted(self) -> bool:
        """Whether no further step may be queued behind those in flight: another worker waits, or has the turn."""
        return self._turn is not None and self._turn.wanted()

    def end(self, in_flight: int) -> None:
        """The loop could launch its next step: a turn that was used is over when none of its steps is in flight, one that is not
        needed any more at once, since of models that launch freely there may always be one."""
        if not self.taken:
            self.give_back(0)
        elif self._turn is not None and self._turn.used:
            self.give_back(in_flight)

    def give_back(self, in_flight: int) -> None:
        """Let others launch, if it is this worker's turn and none of its steps is in flight."""
        if self._turn is not None and self._turn.held and not in_flight:
            self._turn.give_back()
