"""A trouterd for a benchmark, and what its processes cost."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trouterd.daemon import READY_TIMEOUT, Daemon

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Served:
    """A running daemon's sockets."""

    socket: Path
    control: Path

    def ctl(self, *arguments: str) -> Any:
        """What `trouterctl --json` prints.

        Raises:
            subprocess.CalledProcessError: it failed; its message is on standard error.
        """
        command = [sys.executable, "-m", "trouterd.ctl", "--control", str(self.control), "--json", *arguments]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    def metrics(self) -> str:
        """What a GET of /metrics gives."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self.socket))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: trouterd\r\nConnection: close\r\n\r\n")
            parts = list(iter(lambda: connection.recv(1 << 16), b""))
        return b"".join(parts).decode()

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of every process of the daemon so far, by name."""
        return {process["name"]: _cpu(process["pid"]) for process in self.ctl("status")["processes"]}


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.contextmanager
def running(folder: Path, config: str, *, ready_timeout: float = READY_TIMEOUT) -> Iterator[Served]:
    """A daemon with this configuration text, its files and sockets in `folder`; drained at the end."""
    file = folder / "trouterd.toml"
    file.write_text(config)
    served = Served(folder / "api.sock", folder / "api.ctl")
    arguments = ["-c", str(file), "--socket", str(served.socket), "--control", str(served.control)]
    with Daemon(arguments, ready_timeout=ready_timeout):
        yield served
