"""Listening sockets: opened here, inherited by the api, so that a crashed api comes back without a refused connection."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from trouterd.config import Server
from trouterd.consistency import parse_listen

BACKLOG = 1024
CONTROL_MODE = 0o600
log = logging.getLogger("trouterd.supervisor")


class SocketError(Exception):
    """A listening socket cannot be opened; the message names the key, the address and what to do."""


class AddressError(SocketError):
    """The configuration names what cannot be listened on, now or later."""


class SocketInUseError(SocketError):
    """Another process answers on the address."""


class UnixListener:
    """A listening unix socket and the name that it was given."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.sock = sock
        self.path = path
        self._identity = _identity(path)

    def unlink(self) -> None:
        """Remove the name, unless another process has put its own socket there meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self.path) == self._identity:
                self.path.unlink()

    def close(self) -> None:
        """Remove the name and stop listening."""
        self.unlink()
        self.sock.close()


class Listeners:
    """All sockets of the HTTP API."""

    def __init__(self, unix: UnixListener | None, others: list[socket.socket]) -> None:
        self._unix = unix
        self._sockets = ([unix.sock] if unix else []) + others

    @classmethod
    def open(cls, server: Server, inherited: list[socket.socket]) -> Listeners:
        """Those given by the service manager, or else those that the configuration names.

        Raises:
            SocketError: no address at all, or one that cannot be opened.
        """
        if inherited:
            return cls(None, inherited)
        with contextlib.ExitStack() as stack:
            unix = None
            others = []
            if server.socket:
                unix = open_unix("server.socket", Path(server.socket), server.socket_mode, server.socket_group)
                stack.callback(unix.close)
            if server.listen:
                others.append(open_tcp(server.listen))
            if unix is None and not others:
                raise AddressError("server.socket and server.listen are both empty: there is nothing to listen on")
            stack.pop_all()
        return cls(unix, others)

    @property
    def fds(self) -> list[int]:
        """Descriptors for the api; empty once `stop` was called."""
        return [sock.fileno() for sock in self._sockets if sock.fileno() >= 0]

    @property
    def addresses(self) -> list[str]:
        """As people write them: unix:PATH or HOST:PORT."""
        return [_address(sock) for sock in self._sockets if sock.fileno() >= 0]

    def stop(self) -> None:
        """Let go of the sockets: from now on they live as long as the api holds them."""
        for sock in self._sockets:
            sock.close()

    def close(self) -> None:
        """Stop listening and remove the unix socket's name."""
        if self._unix:
            self._unix.unlink()
        self.stop()


def open_unix(key: str, path: Path, mode: int, group: str = "") -> UnixListener:
    """Listen on a unix socket that has its final mode from the first instant.

    A socket file on which nobody answers is replaced. The folder is locked meanwhile, so that of two daemons that start
    at once one wins and the other sees it.

    Raises:
        SocketInUseError: another process answers there.
        AddressError: the path is something else, or the folder is not ours to write.
        SocketError: the system refuses.
    """
    try:
        with _locked(path.parent):
            _remove_stale(key, path)
            return _listen_unix(path, mode, group)
    except PermissionError as error:
        raise AddressError(f"{key}: no permission to listen on {path}") from error
    except OSError as error:
        raise SocketError(f"{key}: cannot listen on {path}: {error.strerror or error}") from error


def open_tcp(listen: str) -> socket.socket:
    """Listen on HOST:PORT, on the first address that the host's name has.

    Raises:
        SocketInUseError: the port is taken.
        SocketError: unknown host, or the system refuses.
    """
    host, port = parse_listen(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SocketError(f"server.listen: {listen}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise SocketInUseError(f"server.listen: {listen} is in use by another process") from error
        raise SocketError(f"server.listen: cannot listen on {listen}: {error.strerror}") from error
    return sock


def _listen_unix(path: Path, mode: int, group: str) -> UnixListener:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # With a group to come, nobody but the owner gets in before the group is set.
    umask = os.umask(~(mode & 0o700 if group else mode) & 0o777)
    try:
        sock.bind(str(path))
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(umask)
    listener = UnixListener(sock, path)
    try:
        if group:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        path.chmod(mode)
        sock.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(key: str, path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise AddressError(f"{key}: {path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            log.info("replacing %s, on which nobody answers", path)
            path.unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full, so somebody is there
    raise SocketInUseError(f"{key}: {path} is in use: another process answers on it")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _address(sock: socket.socket) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
