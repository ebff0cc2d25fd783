"""The worker's side of a trace: it ends and is forgotten by itself, and its frames are small."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from models.script import ScriptRunner
from tests.harness import Cluster
from trouterd.calls import Refused
from trouterd.tracing.events import EVENTS
from trouterd.worker import tracing
from trouterd.worker.tracing import Tracing


def cluster() -> Cluster:
    return Cluster({"small": ScriptRunner([10 + i for i in range(64)], vocab_size=258, cycle=True)}, {})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def call(side: Tracing, verb: str, **args: Any) -> Any:
    return await side.handlers[verb]({"trace": 1} | args)


async def test_frames_are_small_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FRAME", 10)
    async with cluster().running() as running:
        worker = running.workers["small"]
        side = Tracing(worker)
        await call(side, "trace", seconds=60.0)
        await running.generate("small", [1, 2, 3], max_tokens=30)
        summary = await call(side, "trace-stop", keep=True)
        assert worker.recorder is None
        await running.generate("small", [1, 2, 3], max_tokens=30)  # is not in it
        assert await call(side, "trace-stop", keep=True) == summary
        frames = []
        while not frames or frames[-1]["left"]:
            frames.append(await call(side, "trace-read"))
        sizes = [len(EVENTS.decode(frame["events"])) for frame in frames]
        assert set(sizes[:-1]) == {10}
        assert sum(sizes) == summary["events"] > 30
        with pytest.raises(Refused, match="not here"):
            await call(side, "trace-read")


async def test_it_ends_and_is_forgotten_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "KEPT", 0.05)
    async with cluster().running() as running:
        worker = running.workers["small"]
        side = Tracing(worker)
        await call(side, "trace", seconds=0.1)
        recorder = worker.recorder
        assert recorder is not None
        await until(lambda: worker.recorder is None)
        await until(lambda: side._recorder is None)
        with pytest.raises(Refused, match="not here"):
            await call(side, "trace-read")


async def test_a_new_one_takes_the_place_of_one_that_nobody_reads() -> None:
    async with cluster().running() as running:
        side = Tracing(running.workers["small"])
        await call(side, "trace", seconds=60.0)
        await call(side, "trace", trace=2, seconds=60.0)
        with pytest.raises(Refused, match="trace 1 is not here"):
            await call(side, "trace-stop", keep=False)
        assert (await call(side, "trace-stop", trace=2, keep=False))["steps"] == 0
        assert running.workers["small"].recorder is None
        with pytest.raises(Refused):
            await call(side, "trace-read", trace=2)
