"""Opening listening sockets: stale files, addresses in use, permission bits."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from trouterd.config import Server
from trouterd.supervisor.sockets import AddressError, Listeners, SocketError, SocketInUseError, open_tcp, open_unix


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    previous = os.umask(0)
    yield
    os.umask(previous)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o000])
def test_mode_holds_from_the_first_instant(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    seen = []

    def look(target: Path, wanted: int) -> None:
        seen.append(stat.S_IMODE(target.stat().st_mode))

    # Between bind and listen nothing else touches the file: what chmod finds is what bind made.
    monkeypatch.setattr(Path, "chmod", look)
    listener = open_unix("server.socket", path, mode)
    listener.close()
    assert seen == [mode]
    assert os.umask(0) == 0, "the process's umask is as before"


def test_group_gets_in_only_once_it_owns_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp

    seen = []

    def look(path: Path, uid: int, gid: int) -> None:
        seen.append((stat.S_IMODE(path.stat().st_mode), gid))

    monkeypatch.setattr(os, "chown", look)
    group = grp.getgrgid(os.getgid())
    listener = open_unix("server.socket", tmp_path / "s", 0o660, group.gr_name)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    listener.close()
    assert seen == [(0o600, group.gr_gid)]


def test_stale_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = open_unix("server.socket", path, 0o600)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()
    assert not path.exists()


@pytest.mark.parametrize("backlog_full", [False, True])
def test_socket_that_answers_is_in_use(tmp_path: Path, backlog_full: bool) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(str(path))
        other.listen(0)
        if backlog_full:
            waiting.connect(str(path))
        with pytest.raises(SocketInUseError, match=f"server.socket: {path} is in use"):
            open_unix("server.socket", path, 0o600)
        assert path.exists()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(AddressError, match="exists and is not a socket"):
        open_unix("server.socket", path, 0o600)
    assert path.read_text() == "precious"


def test_missing_folder_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="server.socket: cannot listen on .*No such file or directory"):
        open_unix("server.socket", tmp_path / "no" / "s", 0o600)


def test_tcp_port_in_use() -> None:
    with open_tcp("127.0.0.1:0") as first:
        port = first.getsockname()[1]
        with pytest.raises(SocketInUseError, match=f"server.listen: 127.0.0.1:{port} is in use"):
            open_tcp(f"127.0.0.1:{port}")


def test_nothing_to_listen_on() -> None:
    with pytest.raises(AddressError, match="both empty"):
        Listeners.open(Server(socket="", listen=""), [])


def test_failure_of_the_second_socket_closes_the_first(tmp_path: Path) -> None:
    with open_tcp("127.0.0.1:0") as taken:
        server = Server(socket=str(tmp_path / "s"), listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(SocketInUseError):
            Listeners.open(server, [])
    assert not (tmp_path / "s").exists()


def test_both_kinds_at_once(tmp_path: Path) -> None:
    listeners = Listeners.open(Server(socket=str(tmp_path / "s"), listen="127.0.0.1:0"), [])
    unix, tcp = listeners.addresses
    assert unix == f"unix:{tmp_path / 's'}"
    assert tcp.startswith("127.0.0.1:")
    assert len(listeners.fds) == 2
    listeners.close()
    assert listeners.fds == []
