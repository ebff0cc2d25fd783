"""The fleet without the rest of the supervisor: starts that the system refuses."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.errors import SegmentError
from tests.supervisor.daemon import PATIENCE, toy_config
from tests.supervisor.host import ROLES
from trouterd.config import Config, Rings
from trouterd.supervisor.fleet import API, Fleet
from trouterd.supervisor.process import Child
from trouterd.supervisor.rings import RingMesh


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[str]:
    """Let the system refuse the first `times` starts of a child; the starts that were asked for."""
    asked: list[str] = []
    start = Child._start

    def refusing(child: Child, *args: Any) -> Any:
        asked.append(child.name)
        if child.name == name and asked.count(name) <= times:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(child, *args)

    monkeypatch.setattr(Child, "_start", refusing)
    return asked


async def run_fleet(config: Config) -> tuple[str, Fleet]:
    """Start everything and wait until all are ready or the fleet gives up; how it went."""
    mesh = RingMesh([API, *config.models], Rings(capacity=1 << 16))
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    fleet = Fleet(
        config,
        ROLES,
        mesh,
        os.open(os.devnull, os.O_RDWR),
        list,
        on_ready=lambda: outcome.set_result("ready"),
        on_failure=lambda code, message: outcome.done() or outcome.set_result(f"{code}: {message}"),
        on_call=lambda child, call: None,
    )
    try:
        await fleet.start()
        return await asyncio.wait_for(outcome, PATIENCE), fleet
    finally:
        fleet.stopping = True
        await fleet.cancel_respawns()
        fleet.kill_all()
        await asyncio.gather(*(child.exited.wait() for child in fleet.children.values()))
        mesh.close()


async def test_start_that_the_system_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuse(monkeypatch, "small", 2)
    outcome, fleet = await run_fleet(toy_config(tmp_path, small="ok"))
    assert outcome == "ready"
    assert asked == [API, "small", "small", "small"]
    assert fleet.children["small"].epoch == 3


async def test_start_that_is_always_refused_ends_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(tmp_path, small="ok")
    supervision = msgspec.structs.replace(config.supervision, start_attempts=2)
    refuse(monkeypatch, "small", 9)
    outcome, _ = await run_fleet(msgspec.structs.replace(config, supervision=supervision))
    assert outcome == ("1: small could not be started: Resource temporarily unavailable before it was ready, 2 times")


async def test_broken_ring_that_cannot_be_replaced_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(mesh: RingMesh, name: str) -> list[str]:
        raise SegmentError(f"no room for the rings of {name}")

    monkeypatch.setattr(RingMesh, "replace_poisoned", full)
    outcome, _ = await run_fleet(toy_config(tmp_path, small="raise:dead"))
    assert outcome == "1: no new ring in place of a broken one of small: no room for the rings of small"
