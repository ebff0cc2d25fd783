"""A trouterd for a benchmark, what its processes cost, and a connection to steer it by."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.fetch import UNIX, fetch
from trouterd.control import Call, Reply, pack_frame, receive_frame
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
        return fetch(f"{UNIX}{self.socket}", "/metrics").decode()

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of every process of the daemon so far, by name."""
        return {process["name"]: _cpu(process["pid"]) for process in self.ctl("status")["processes"]}


class Link:
    """A control connection for a whole measurement, for any thread: a verb costs no process, as `Served.ctl` does.

    Raises:
        RuntimeError: nobody listens there.
    """

    def __init__(self, served: Served) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(served.control))
        except OSError as error:
            self._socket.close()
            raise RuntimeError(f"no daemon answers at {served.control}: {error.strerror or error}") from error
        self._lock = threading.Lock()

    def call(self, verb: str, **args: Any) -> Any:
        """The answer to a verb.

        Raises:
            RuntimeError: it was refused, or failed, or the daemon is gone.
        """
        with self._lock:
            try:
                self._socket.sendall(pack_frame(Call(id=1, verb=verb, args=args)))
                reply = receive_frame(self._socket)
            except OSError as error:
                raise RuntimeError(f"{verb}: the daemon has ended ({error.strerror or error})") from error
        if reply is None:
            raise RuntimeError(f"{verb}: the daemon has ended")
        if not isinstance(reply, Reply) or reply.error:
            raise RuntimeError(f"{verb} {args}: {reply.error if isinstance(reply, Reply) else reply}")
        return reply.result

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.contextmanager
def running(
    folder: Path,
    config: str,
    *,
    ready_timeout: float = READY_TIMEOUT,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    """A daemon with this configuration text, its files and sockets in `folder`; drained at the end.

    Args:
        folder: is there.
        config: text of trouterd.toml.
        ready_timeout: seconds.
        variables: of its environment, over this process's.

    Raises:
        trouterd.daemon.DaemonError: it did not start; it has said why on standard error.
    """
    file = folder / "trouterd.toml"
    file.write_text(config)
    served = Served(folder / "api.sock", folder / "api.ctl")
    arguments = ["-c", str(file), "--socket", str(served.socket), "--control", str(served.control)]
    with Daemon(arguments, ready_timeout=ready_timeout, variables=variables):
        yield served
