"""Start, death, restart and stall of children."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from tests.supervisor.conftest import Start
from tests.supervisor.daemon import PATIENCE, alive, finish, segments, stalls, toy_config
from trouterd.config import Rings


def test_ready_when_every_child_is_and_light_itself(start: Start) -> None:
    daemon = start(small="ok", large="ok").wait_ready()
    status = daemon.status()
    assert status["state"] == "ready"
    assert [(p["name"], p["state"], p["epoch"]) for p in status["processes"]] == [
        ("api", "up", 1),
        ("small", "up", 1),
        ("large", "up", 1),
    ]
    assert all(process["rss_bytes"] > 1 << 20 for process in status["processes"])
    assert status["api"]["models"] == ["small", "large"], "the api asked back over its own control link"
    assert {(ring["from"], ring["to"]) for ring in status["rings"]} == {
        (a, b) for a in ("api", "small", "large") for b in ("api", "small", "large") if a != b
    }
    assert segments(daemon.process.pid) == [], "names are gone as soon as the rings exist"
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "heavy modules: none" in daemon.log


def test_killed_worker_is_reported_down_and_comes_back_with_the_next_epoch(start: Start) -> None:
    daemon = start(small="ok", large="ok").wait_ready()
    victim, others = daemon.child("large")["pid"], (daemon.child("api")["pid"], daemon.child("small")["pid"])
    os.kill(victim, signal.SIGKILL)
    daemon.wait_for(lambda: daemon.child("large")["state"] == "up" and daemon.child("large")["epoch"] == 2, "restart")
    states = [state[:3] for state in daemon.status()["api"]["states"] if state[0] == "large"]
    assert states == [["large", "up", 1], ["large", "down", 1], ["large", "up", 2]]
    assert daemon.child("large")["restarts"] == 1
    assert (daemon.child("api")["pid"], daemon.child("small")["pid"]) == others
    line = daemon.wait_log("was killed by SIGKILL")
    assert f"large (pid {victim})" in line


def test_death_wakes_both_ends_of_its_rings(start: Start) -> None:
    daemon = start(small="ok").wait_ready()
    api = daemon.child("api")["pid"]
    ring = next(ring for ring in daemon.status()["rings"] if ring["from"] == "small")
    os.kill(daemon.child("small")["pid"], signal.SIGKILL)
    daemon.wait_log("was killed by SIGKILL")
    counts = [
        int(line.split()[1], 16)
        for info in Path(f"/proc/{api}/fdinfo").iterdir()
        for line in info.read_text().splitlines()
        if line.startswith("eventfd-count:")
    ]
    assert ring["to"] == "api"
    kicked = [count for count in counts if count]
    assert len(kicked) == 4, (
        "data and space of two rings: the toy api never reads its events, so every kick is still there"
    )


def test_restarted_api_serves_on_the_same_socket(start: Start) -> None:
    daemon = start(small="ok").wait_ready()
    inode = Path(daemon.config.server.socket).stat().st_ino
    os.kill(daemon.child("api")["pid"], signal.SIGKILL)
    # Connecting works while nobody is there: the supervisor holds the listening socket.
    daemon.wait_log("was killed by SIGKILL")
    assert finish(daemon.open_request()) == b"done\n"
    assert Path(daemon.config.server.socket).stat().st_ino == inode
    assert daemon.child("api")["epoch"] == 2


def test_children_die_with_a_killed_supervisor_even_inside_native_code(start: Start, tmp_path: Path) -> None:
    daemon = start(stalls(toy_config(tmp_path, small="ok", stuck="native")), options={"scrape": 0.2}).wait_ready()
    daemon.wait_for(lambda: daemon.child("stuck")["state"] == "stalled", "the native call holds the GIL")
    pids = daemon.child_pids()
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    daemon.wait_for(lambda: not any(map(alive, pids)), "all children gone")
    assert segments(daemon.process.pid) == []
    again = start(small="ok").wait_ready()
    assert again.status()["state"] == "ready"


def test_stopped_worker_counts_as_stalled_until_it_goes_on(start: Start, tmp_path: Path) -> None:
    config = stalls(toy_config(tmp_path, small="ok", large="ok"))
    daemon = start(config, options={"WATCHDOG_USEC": "200000", "scrape": 2.0}).wait_ready()
    pid = daemon.child("large")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        line = daemon.wait_log(f"large (pid {pid}, process state T)")
        assert "has not answered for" in line
        assert "small>large 0 of 1048576 bytes, 0 messages spilled" in line
        daemon.notifications()
        daemon.lines.clear()
        assert ["large", "stalled", 1, "T"] in daemon.status()["api"]["states"]
        assert daemon.status()["state"] == "degraded"
        assert "WATCHDOG=1" not in daemon.notifications(), "no sign of life while a worker makes no progress"
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    daemon.wait_for(lambda: daemon.child("large")["state"] == "up", "progress again")
    daemon.wait_for(lambda: "WATCHDOG=1" in daemon.notifications(), "signs of life again")


def test_one_endless_step_counts_as_a_stall(start: Start, tmp_path: Path) -> None:
    config = toy_config(tmp_path, small="step")
    supervision = msgspec.structs.replace(config.supervision, stall_after=0.3)
    daemon = start(msgspec.structs.replace(config, supervision=supervision)).wait_ready()
    assert "has been in one step for" in daemon.wait_log("has been in one step")
    assert daemon.child("small")["state"] == "stalled"
    assert daemon.child("small")["steps"] == 7


def test_fatal_message_ends_the_daemon_with_78(start: Start) -> None:
    daemon = start(small="ok", large="fatal:no tensor lm_head.weight")
    assert daemon.wait() == 78
    critical = [line for line in daemon.log.splitlines() if "CRITICAL" in line]
    assert len(critical) == 1
    assert critical[0].endswith("large: no tensor lm_head.weight")


def test_crash_loop_at_start_gives_up_and_names_the_reason(start: Start) -> None:
    daemon = start(small="ok", large="raise:out of luck")
    assert daemon.wait() == 1
    line = daemon.wait_log("before it was ready")
    assert "large exited with code 1 before it was ready, 3 times (ValueError: out of luck)" in line


def test_child_that_never_becomes_ready_is_a_failure(start: Start, tmp_path: Path) -> None:
    config = toy_config(tmp_path, small="silent")
    supervision = msgspec.structs.replace(config.supervision, start_timeout=0.6, start_attempts=1)
    daemon = start(msgspec.structs.replace(config, supervision=supervision))
    assert daemon.wait() == 1
    assert "not ready within supervision.start_timeout = 0.6 s" in daemon.wait_log("before it was ready")


def test_broken_ring_is_replaced_and_both_ends_restart(start: Start, tmp_path: Path) -> None:
    """A child that finds a record broken marks the ring and exits; the other end maps the same dead ring."""
    daemon = start(small="ok", large="ok").wait_ready()
    pid = daemon.child("large")["pid"]
    poison(pid)
    os.kill(pid, signal.SIGKILL)
    for name in ("small", "large"):
        daemon.wait_for(lambda name=name: daemon.child(name)["epoch"] == 2, f"{name} restarted")
    daemon.wait_for(lambda: daemon.status()["state"] == "ready", "ready again")
    assert all(ring["state"] == 1 for ring in daemon.status()["rings"])


def poison(pid: int) -> None:
    """Mark the ring small>large as a reader does that found a broken record."""
    from ipc.layout import State
    from ipc.segment import SharedSegment

    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "trouterd-" not in os.readlink(link):  # noqa: PTH115 - a magic link, not a path
            continue
        fd = os.open(link, os.O_RDWR)
        segment = SharedSegment.from_fd(fd)
        if segment.spec.ring_id == 1 << 32 | 2:
            segment.advance(State.POISONED)
        segment.close()
        os.close(fd)


def test_too_little_shared_memory_is_a_clear_error(start: Start, tmp_path: Path) -> None:
    config = msgspec.structs.replace(toy_config(tmp_path), rings=Rings(capacity=1 << 36))
    daemon = start(config)
    assert daemon.process.wait(PATIENCE) == 1
    assert "rings.capacity" in daemon.log
    assert segments(daemon.process.pid) == []
