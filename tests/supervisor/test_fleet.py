"""The fleet without the rest of the supervisor: starts that the system refuses, and time that is not counted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.errors import SegmentError
from tests.supervisor.daemon import PATIENCE, gpu_config, toy_config
from tests.supervisor.host import ROLES
from trouterd.config import Config, Rings
from trouterd.control import Call, Reply
from trouterd.memory import Claim
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


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[Fleet, asyncio.Future[str]]]:
    """Everything started, and how it goes: `ready`, or why the fleet gives up."""
    mesh = RingMesh([API, *config.models], Rings(capacity=1 << 16))
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    sizing: list[asyncio.Task[None]] = []
    fleet = Fleet(
        config,
        ROLES,
        mesh,
        os.open(os.devnull, os.O_RDWR),
        list,
        on_ready=lambda: outcome.set_result("ready"),
        on_failure=lambda code, message: outcome.done() or outcome.set_result(f"{code}: {message}"),
        on_call=lambda child, call: sizing.append(asyncio.create_task(agree(fleet, child, call))),
    )
    try:
        await fleet.start()
        yield fleet, outcome
    finally:
        fleet.stopping = True
        await fleet.cancel_respawns()
        fleet.kill_all()
        await asyncio.gather(*(child.exited.wait() for child in fleet.children.values()))
        await asyncio.gather(*sizing, return_exceptions=True)
        mesh.close()


async def agree(fleet: Fleet, child: Child, call: Call) -> None:
    """What the supervisor does with a claim."""
    tokens = await fleet.sizing.agree(child.name, msgspec.convert(call.args["claim"], Claim))
    child.send(Reply(id=call.id, result=tokens))


async def run_fleet(config: Config) -> tuple[str, Fleet]:
    """Start everything and wait until all are ready or the fleet gives up; how it went."""
    async with running(config) as (fleet, outcome):
        return await asyncio.wait_for(outcome, PATIENCE), fleet


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


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


async def test_time_that_a_child_waits_for_others_is_not_counted(tmp_path: Path) -> None:
    config = toy_config(tmp_path, small="waits", large="silent")
    limit = config.supervision.start_timeout
    async with running(config) as (fleet, _):
        small, large = fleet.children["small"], fleet.children["large"]
        await until(lambda: fleet.children[API].ready_at and small.waits)
        fleet.tick(time.monotonic() + 2 * limit)
        await until(lambda: large.epoch == 2)
        change = {"key": "server.drain_timeout", "value": 9, "config": msgspec.to_builtins(config)}
        await small.call("set", change, within=PATIENCE)
        await until(lambda: small.ready_at)
        assert small.restarts == 0


async def test_time_that_a_model_waits_for_the_sizes_of_others_is_not_counted(tmp_path: Path) -> None:
    """The other one waits for an end that comes only when it has been too slow."""
    config = gpu_config(tmp_path, small="weights=100", large="weights=500,after=1")
    limit = config.supervision.start_timeout
    async with running(config) as (fleet, outcome):
        small, large = fleet.children["small"], fleet.children["large"]
        await until(lambda: fleet.children[API].ready_at and fleet.sizing.waits("small"))
        fleet.tick(time.monotonic() + 2 * limit)
        await until(lambda: large.epoch == 2)
        assert small.epoch == 1
        small.kill()
        assert await asyncio.wait_for(outcome, PATIENCE) == "ready"
        assert small.detail["kv_tokens"] == large.detail["kv_tokens"] == 150
