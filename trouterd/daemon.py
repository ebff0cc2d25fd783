"""A daemon as a child process of a script: started, waited for until it is ready, drained at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from trouterd.interpreter import environment, module_command

READY_TIMEOUT = 120.0
"""Seconds that a daemon gets to load its models."""
_POLL = 0.1
"""Seconds between two looks at whether the process is still there while it starts."""


class DaemonError(Exception):
    """The daemon did not become ready; it has said why on standard error."""


class Daemon:
    """`with Daemon(["-c", "trouterd.toml"]) as daemon:` runs `trouterd serve` with these arguments; it ends with this
    process, if that is killed.

    Readiness is learned from the daemon's own notification, so nothing is polled over HTTP. `variables` are put over this process's
    environment.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        ready_timeout: float = READY_TIMEOUT,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._arguments = arguments
        self._ready_timeout = ready_timeout
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """
        Raises:
            DaemonError: it exited, or was not ready in time.
        """
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trouterd-"))
            address = str(Path(folder) / "notify")
            notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            notify.bind(address)
            notify.settimeout(_POLL)
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                module_command("trouterd.cli", "serve", "--parent", str(os.getpid()), *self._arguments),
                env=environment(**self._variables, NOTIFY_SOCKET=address),
                process_group=0,  # a terminal's Ctrl-C reaches the script, which drains us
            )
            stack.callback(self.stop)
            self._wait_ready(self._process, notify)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        """Process id of the supervisor; 0 when it is not running."""
        return self._process.pid if self._process else 0

    def stop(self) -> int:
        """Drain and wait; returns the exit code. A second call returns it again."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes], notify: socket.socket) -> None:
        deadline = time.monotonic() + self._ready_timeout
        while process.poll() is None:
            try:
                if b"READY=1" in notify.recv(4096).split(b"\n"):
                    return
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise DaemonError(f"the daemon was not ready within {self._ready_timeout:g} s") from None
        raise DaemonError(f"the daemon exited with code {process.returncode} before it was ready")
