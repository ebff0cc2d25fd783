"""The control connection that a measurement holds."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from bench.daemon import Link, Served


@pytest.mark.parametrize("heard", [False, True])
def test_a_daemon_that_has_ended_is_told_for_every_verb(tmp_path: Path, heard: bool) -> None:
    control = tmp_path / "c"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(control))
        server.listen()
        with closing(Link(Served(tmp_path / "s", control))) as link:
            daemon, _ = server.accept()
            if heard:
                daemon.shutdown(socket.SHUT_WR)
            else:
                daemon.close()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="status: the daemon has ended"):
                    link.call("status")
            daemon.close()


def test_a_daemon_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no daemon answers at"):
        Link(Served(tmp_path / "s", tmp_path / "c"))
