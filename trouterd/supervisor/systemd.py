"""What a service manager gives and wants: readiness, a watchdog, listening sockets (sd_notify(3), sd_listen_fds(3))."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

from trouterd.supervisor.sockets import SocketError

_FIRST_FD = 3
log = logging.getLogger("trouterd.supervisor")


class Notifier:
    """Sends state lines to $NOTIFY_SOCKET; does nothing where there is none."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        # A leading @ stands for the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        if self._socket:
            self._socket.setblocking(False)
        self._complained = False
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        mine = not pid or pid == str(os.getpid())
        self.watchdog_seconds = int(usec) / 1e6 if usec.isdigit() and mine else 0.0
        """The time within which the manager wants a sign of life; 0 = it wants none."""

    def send(self, *lines: str) -> None:
        """For example `READY=1`, `STATUS=...`, `WATCHDOG=1`."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            # Said once, tried on: a manager that is busy or restarts itself must not miss the watchdog's next sign.
            if not self._complained:
                log.warning("cannot notify the service manager at %r: %s", self._address, error)
            self._complained = True

    def close(self) -> None:
        """Close the socket."""
        if self._socket:
            self._socket.close()


class InheritedSockets:
    """Sockets that the service manager opened: one named `control` is trouterctl's, all others are the HTTP API's."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """
        Raises:
            SocketError: an inherited descriptor is no socket.
        """
        count = environ.pop("LISTEN_FDS", "")
        pid = environ.pop("LISTEN_PID", "")
        names = environ.pop("LISTEN_FDNAMES", "").split(":")
        self.api: list[socket.socket] = []
        self.control: socket.socket | None = None
        if pid != str(os.getpid()) or not count.isdigit():
            return
        for index in range(int(count)):
            fd = _FIRST_FD + index
            try:
                os.set_inheritable(fd, False)
                inherited = socket.socket(fileno=fd)
            except OSError as error:
                raise SocketError(f"LISTEN_FDS: descriptor {fd} is no socket: {error.strerror}") from error
            if index < len(names) and names[index] == "control":
                self.control = inherited
            else:
                self.api.append(inherited)
