"""Removes segment names that a killed supervisor left behind in the instant between creation and unlink."""

from __future__ import annotations

import os
import re
from pathlib import Path

import posix_ipc

from ipc.host import boot_id, start_ticks
from ipc.segment import NAME_PREFIX

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - the kernel's folder of POSIX shared memory, not a temporary file
_NAME = re.compile(re.escape(NAME_PREFIX) + r"([0-9a-f]{8})-(\d{1,10})-(\d{1,20})-[0-9a-f]{1,16}")


def sweep() -> list[str]:
    """Unlinks our stale names: of another boot, of a process that is gone or of an earlier one with the same pid.

    Names of living processes, of other users and of other programs are spared. Returns what was removed.
    """
    removed = []
    for path in SHM_FOLDER.glob(NAME_PREFIX + "*"):
        match = _NAME.fullmatch(path.name)
        if match and _is_ours(path) and _is_stale(match[1], int(match[2]), int(match[3])):
            try:
                posix_ipc.unlink_shared_memory("/" + path.name)
            except posix_ipc.ExistentialError:
                continue
            removed.append(path.name)
    return removed


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _is_stale(boot: str, pid: int, ticks: int) -> bool:
    return boot != boot_id()[:8] or start_ticks(pid) != ticks
