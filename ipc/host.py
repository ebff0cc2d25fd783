"""Facts about this boot and its processes that make segment names and tags unique."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """The kernel's random id of this boot, 32 hex digits."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def boot_tag() -> int:
    """64-bit hash of the boot id: a segment of another boot is never attached."""
    return int.from_bytes(hashlib.blake2b(boot_id().encode(), digest_size=8).digest(), "little")


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold blanks and parentheses; the fields are counted from behind its last parenthesis.
    return int(stat.rpartition(")")[2].split()[19])
