"""Models that take turns: one of them at a time has the whole GPU."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

log = logging.getLogger(__name__)

_TURN, _QUEUE = 0, 1
"""Bytes of the file of turns: whose turn it is, and who gets the next one."""
PATIENCE = 1.0
"""Seconds after which a worker that waits for its turn looks again, although it is told."""


class TurnError(RuntimeError):
    """The file of turns cannot be locked any more: steps would run side by side, or never again, so the worker has to end."""


class Turn:
    """One worker's hold on the turn that the workers of a daemon share.

    Whoever waits for the turn holds the queue, so that a worker that has just had a turn cannot take the next one before it. Both
    are record locks of one file: the system frees them when a process ends, however it ends.

    Args:
        file: the file of turns, the same for all workers; nobody closes it, since that would free this process's locks of it.
        granted: called in the running event loop when a turn that had to be waited for has come, or cannot come any more.
    """

    def __init__(self, file: int, granted: Callable[[], None]) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._granted = granted
        self._waits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Waits to be made, each with whether the queue is held already."""
        self._waiting = False
        """In the thread."""
        self._looking = False
        """By whoever asks `come`; the queue is held then."""
        self._fault: TurnError | None = None
        """Why the turn that is waited for cannot come."""
        self.held = False
        self.used = False
        """A step was launched in this turn, or is about to be."""
        # No part of an executor, whose end would wait for it.
        threading.Thread(target=self._wait, name="turn", daemon=True).start()

    def take(self, *, look: bool = False) -> bool:
        """Whether it is this worker's turn, to be used; if not, it waits for it from now on.

        Args:
            look: where it is next, the caller will ask `come` until it has come, or `rest` or `leave`, rather than being told. The
                others wait in the order of the queue.

        Raises:
            TurnError: the file cannot be locked.
        """
        if self._fault is not None:
            raise self._fault
        if not self.held and not self._waiting:
            self._looking = self._looking or self._lock(_QUEUE)
            if not self.come() and not (look and self._looking):
                self._wait_in_thread()
        self.used = self.held
        return self.held

    def come(self) -> bool:
        """Whether a turn that is looked for has come. Raises TurnError."""
        if not self._looking or not self._lock(_TURN):
            return False
        self.leave()
        self.held = True
        return True

    def rest(self) -> None:
        """Be told, instead of looking."""
        if self._looking:
            self._wait_in_thread()

    def leave(self) -> None:
        """Look no more: a turn is not needed. Raises TurnError."""
        if self._looking:
            self._looking = False
            self._unlock(_QUEUE)

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
                _wait(self._file, queued)
                self._unlock(_QUEUE)
            except TurnError as error:
                fault = error
            with suppress(RuntimeError):  # the loop has ended, and the process is about to
                self._loop.call_soon_threadsafe(self._has_come, fault)

    def _wait_in_thread(self) -> None:
        self._waits.put(self._looking)
        self._looking, self._waiting = False, True

    def _has_come(self, fault: TurnError | None) -> None:
        self.held, self._waiting, self._fault = fault is None, False, fault
        self._granted()

    def _lock(self, byte: int) -> bool:
        return _locked(self._file, byte)

    def _unlock(self, byte: int) -> None:
        _lockf(self._file, fcntl.LOCK_UN, byte)


@asynccontextmanager
async def whole_turn(file: int, waits: Callable[[bool], None]) -> AsyncIterator[None]:
    """The turn, kept for the block: a worker that starts has steps to run, too.

    Args:
        file: as of `Turn`, which this process must not have yet: its locks would be the same.
        waits: told that it waits, and when that is over.

    Raises:
        TurnError: the file cannot be locked.
    """
    queued = _locked(file, _QUEUE)
    if not (queued and _locked(file, _TURN)):
        log.info("it is another model's turn; waiting for it to end")
        waits(True)
        await asyncio.to_thread(_wait, file, queued)
        waits(False)
    _lockf(file, fcntl.LOCK_UN, _QUEUE)
    try:
        yield
    finally:
        _lockf(file, fcntl.LOCK_UN, _TURN)


def _wait(file: int, queued: bool) -> None:
    if not queued:
        _lockf(file, fcntl.LOCK_EX, _QUEUE)
    _lockf(file, fcntl.LOCK_EX, _TURN)


def _locked(file: int, byte: int) -> bool:
    """Lock a byte if nobody else has it."""
    try:
        _lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, byte)
    except BlockingIOError:
        return False
    return True


def _lockf(file: int, operation: int, byte: int) -> None:
    try:
        fcntl.lockf(file, operation, 1, byte)
    except BlockingIOError:
        raise
    except OSError as error:
        raise TurnError(f"batching.overlap: the file of turns cannot be locked: {error.strerror}") from error


class Turns:
    """Whether a worker waits for its turn: a live setting, in force from one step to the next.

    Args:
        granted: called in the running event loop when a turn has come, or cannot come any more.
    """

    def __init__(self, granted: Callable[[], None]) -> None:
        self._granted = granted
        self._turn: Turn | None = None
        self._refused = False
        """The worker has been told that it is not its turn since it last said what runs."""
        self.taken = False
        """Steps are launched while no other worker's run."""

    def configure(self, file: int | None) -> None:
        """From now on launch a step only while no other worker of the daemon runs one.

        Args:
            file: the file of turns that the workers share; None: launch freely.
        """
        if file is not None and self._turn is None:
            self._turn = Turn(file, self._granted)
        self.taken = file is not None

    def take(self, *, look: bool) -> bool:
        """Whether it is this worker's turn, to be used; see `Turn.take`."""
        self._refused = self._turn is not None and not self._turn.take(look=look)
        return self._turn is not None and self._turn.held

    @property
    def used(self) -> bool:
        """A step was launched in this worker's turn, or is about to be."""
        return self._turn is not None and self._turn.used

    def come(self) -> bool:
        """Whether a turn that is looked for has come."""
        return self._turn is not None and self._turn.come()

    def rest(self) -> None:
        """Be told of one, instead of looking."""
        if self._turn is not None:
            self._turn.rest()

    def wanted(self) -> bool:
        """Whether no further step may be queued behind those in flight: another worker waits, or has the turn."""
        return self._turn is not None and self._turn.wanted()

    def end(self, running: int) -> None:
        """So many steps run of those that are in flight: a turn that was used is over when none does, one that is not needed any
        more at once, since of models that launch freely there may always be one."""
        self._refused = False
        if not self.taken or (self._turn is not None and self._turn.used and not running):
            self.give_back()

    def give_back(self) -> None:
        """Let others launch, if it is this worker's turn, or one is looked for that is not needed any more."""
        if self._turn is None:
            return
        if self._turn.held:
            self._turn.give_back()
        elif not self._refused:
            self._turn.leave()
