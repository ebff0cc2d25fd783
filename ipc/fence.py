"""Full memory barriers for the pure-Python ring."""

from __future__ import annotations

import ctypes
import logging
import platform
import threading
from collections.abc import Callable

from ipc.errors import UnsupportedMachineError

log = logging.getLogger(__name__)

_SYS_MEMBARRIER = 324  # x86-64
_QUERY = 0
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


def require_x86_64() -> None:
    """Raises UnsupportedMachineError elsewhere: plain stores and loads are ordered on x86-64 only."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        raise UnsupportedMachineError(
            f"the pure-Python ring is not correct on {machine}: build the C core (python setup.py build_ext --inplace)"
        )


def _membarrier(command: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_SYS_MEMBARRIER, command, 0, 0))


def register_membarrier() -> bool:
    """Asks the kernel to include this process in expedited global barriers; False if it cannot or may not."""
    needed = _GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
    supported = _membarrier(_QUERY)
    return supported >= 0 and supported & needed == needed and _membarrier(_REGISTER_GLOBAL_EXPEDITED) == 0


def membarrier_fence() -> Callable[[], None]:
    """A barrier on every running thread of every registered process: the peer then needs none of its own."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall

    def fence() -> None:
        if syscall(_SYS_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "membarrier")

    return fence


def lock_fence() -> Callable[[], None]:
    """A barrier on this thread only: taking a free lock is a locked instruction, which x86-64 never reorders."""
    lock = threading.Lock()

    def fence() -> None:
        lock.acquire()
        lock.release()

    return fence


def no_fence() -> None:
    """Program order: enough for the fast path when the other end calls membarrier before it sleeps."""


def choose_fences() -> tuple[Callable[[], None], Callable[[], None], bool]:
    """The barrier after each cursor store, the barrier before each sleep, and whether they rely on membarrier."""
    if register_membarrier():
        return no_fence, membarrier_fence(), True
    log.warning("membarrier is not available here: the pure-Python ring fences every push with a lock instead")
    return lock_fence(), lock_fence(), False
