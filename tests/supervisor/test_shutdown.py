"""Drain, force, timeout: what happens to answers that run when the daemon is told to stop."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from tests.supervisor.conftest import Start
from tests.supervisor.daemon import Daemon, finish, rest, segments, stalls, toy_config


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains(start: Start, number: signal.Signals) -> None:
    daemon = start().wait_ready()
    running = [daemon.open_request() for _ in range(2)]
    daemon.signal(number)
    daemon.wait_log(f"{number.name}: draining")
    assert [finish(link) for link in running] == [b"done\n", b"done\n"]
    assert daemon.wait() == 0
    assert "STOPPING=1" in daemon.notifications()
    assert not Path(daemon.config.server.socket).exists()
    assert not Path(daemon.config.server.control).exists()


def test_second_signal_forces(start: Start) -> None:
    daemon = start().wait_ready()
    link = daemon.open_request()
    daemon.signal(signal.SIGTERM)
    daemon.wait_log("SIGTERM: draining")
    daemon.signal(signal.SIGTERM)
    assert rest(link) == b"error\n", "the client is told"
    assert daemon.wait() == 1


def test_clients_are_told_however_little_time_workers_get(start: Start) -> None:
    daemon = start(options={"forced": 0.0}).wait_ready()
    link = daemon.open_request()
    daemon.signal(signal.SIGTERM)
    daemon.wait_log("SIGTERM: draining")
    daemon.signal(signal.SIGTERM)
    assert rest(link) == b"error\n"
    assert daemon.wait() == 1


def test_drain_timeout_cuts_off(start: Start, tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    server = msgspec.structs.replace(config.server, drain_timeout=4.0)
    daemon = start(msgspec.structs.replace(config, server=server)).wait_ready()
    link = daemon.open_request()
    daemon.signal(signal.SIGTERM)
    assert rest(link) == b"error\n"
    assert daemon.wait() == 1
    assert "1 answer was cut off" in daemon.log


def test_drain_by_control_socket(start: Start) -> None:
    daemon = start().wait_ready()
    link = daemon.open_request()
    reply = daemon.ask("drain")
    assert reply.result == {"state": "draining", "drain_timeout": 30.0}
    assert finish(link) == b"done\n"
    assert daemon.wait() == 0


def test_second_drain_joins_the_first(start: Start) -> None:
    daemon = start().wait_ready()
    link = daemon.open_request()
    answers = [daemon.ask("drain").result for _ in range(2)]
    assert answers == [{"state": "draining", "drain_timeout": 30.0}] * 2
    assert finish(link) == b"done\n"
    assert daemon.wait() == 0
    assert "already draining" in daemon.log


def test_stuck_worker_does_not_hold_up_the_end(start: Start, tmp_path: Path) -> None:
    daemon = start(stalls(toy_config(tmp_path, small="ok", stuck="native")), options={"scrape": 0.2}).wait_ready()
    daemon.wait_for(lambda: daemon.child("stuck")["state"] == "stalled", "the native call holds the GIL")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def test_answers_do_not_wait_for_what_starts(start: Start) -> None:
    """A model that starts in its turn would keep the others from their steps."""
    daemon = start(small="ok", large="silent")
    daemon.wait_log("large started")
    daemon.wait_for(lambda: daemon.child("small")["state"] == "up" and daemon.child("api")["state"] == "up", "ready")
    link = daemon.open_request()
    daemon.signal(signal.SIGTERM)
    daemon.wait_for(lambda: daemon.child("large")["state"] == "down", "end of the starting one")
    assert daemon.child("small")["state"] == "up"
    assert finish(link) == b"done\n"
    assert daemon.wait() == 0


def test_stop_while_starting(start: Start) -> None:
    daemon = start(small="silent")
    daemon.wait_log("small started")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_while_sockets_are_opened(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    config, folder = toy_config(tmp_path), tmp_path / "control"
    folder.mkdir()
    server = msgspec.structs.replace(config.server, control=str(folder / "api.ctl"))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # here it waits, with the API's socket open
        daemon = start(msgspec.structs.replace(config, server=server))
        daemon.wait_for(Path(server.socket).exists, "the API's socket")
        daemon.signal(number)
    finally:
        os.close(lock)
    assert daemon.wait() == 0, daemon.log
    assert f"{number.name}: draining" in daemon.log
    assert not Path(server.socket).exists()
    assert not Path(server.control).exists()
    assert not segments(daemon.process.pid)


def test_drained_daemon_leaves_a_socket_that_another_one_put_there(start: Start) -> None:
    daemon = start().wait_ready()
    path = Path(daemon.config.server.socket)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert path.exists()


def test_dead_children_stay_dead_while_draining(start: Start) -> None:
    daemon: Daemon = start().wait_ready()
    link = daemon.open_request()
    pid = daemon.child("small")["pid"]
    daemon.signal(signal.SIGTERM)
    daemon.wait_log("SIGTERM: draining")
    os.kill(pid, signal.SIGKILL)
    assert finish(link) == b"done\n"
    assert daemon.wait() == 0
    assert "restarting" not in daemon.log
