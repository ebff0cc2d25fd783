"""trouterctl trace against a whole daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.daemon.instance import START_TIMEOUT, Instance, scripts, serving, stream
from tests.daemon.link import Link
from trouterd import ctl


@asynccontextmanager
async def clients(session: aiohttp.ClientSession, count: int) -> AsyncIterator[None]:
    """So many streams, one after the other by each client, while the block runs."""
    over = False

    async def client() -> None:
        while not over:
            assert (await stream(session, max_tokens=48)).done

    tasks = [asyncio.create_task(client()) for _ in range(count)]
    yield
    over = True
    await asyncio.gather(*tasks)


async def trouterctl(instance: Instance, *arguments: str) -> tuple[int, str]:
    """Exit code and what it says on standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trouterd.ctl", "--control", str(instance.control), *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def test_a_trace_of_two_models(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    async with serving(tmp_path, scripts(tmp_path, delay_ms=2.0, large_delay_ms=5.0)) as instance:
        async with instance.session() as session, clients(session, 6):
            await instance.ctl("batching", "set", "large", "1,2,3")
            begun = time.monotonic()
            shown = await instance.ctl("trace", "--seconds", "1.5", "--output", str(file))
            took = time.monotonic() - begun
        timeline = json.loads(file.read_text())
        check_summary(shown)
        assert all(0 < model["seconds"] < took for model in shown.values())
        assert timeline["otherData"]["models"] == shown
        check_steps(timeline["traceEvents"])
        check_arrows(timeline["traceEvents"])
        await refusals(instance, tmp_path)
        assert await instance.stop() == 0


def check_summary(shown: dict[str, Any]) -> None:
    assert list(shown) == ["small", "large"]
    for model in shown.values():
        assert sum(model["shares"].values()) == pytest.approx(1)
        assert min(model["shares"].values()) >= 0
        assert model["shares"]["busy"] > 0
        assert 1 <= model["batch"] <= 6
        assert 0 < model["handoff_ms"]["p50"] <= model["handoff_ms"]["p99"]
    assert shown["large"]["shares"]["held"] > 0


def check_steps(events: list[dict[str, Any]]) -> None:
    """Slices of both models that fill the time, without two at once."""
    for pid in (1, 2):
        row = sorted(
            (e["ts"], e["ts"] + e["dur"], e["name"])
            for e in events
            if (e["ph"], e["pid"], e.get("tid")) == ("X", pid, 1)
        )
        assert sum(name == "step" for *_, name in row) > 5
        gaps = [after[0] - before[1] for before, after in zip(row, row[1:], strict=False)]
        assert max(map(abs, gaps)) < 0.01, "microseconds, rounded"
    steps = [e["args"] for e in events if e["name"] == "step"]
    assert {args["launched_by"] for args in steps} >= {"none", "threshold"}
    assert all(args["rows"] >= args["requests"] >= args["alive"] >= args["handed_over"] for args in steps)
    counters = [e["args"] for e in events if e["ph"] == "C"]
    assert max(counts["away"] for counts in counters) > 0
    assert {e["name"] for e in events if e["ph"] == "i"} == {"admitted", "finished"}


def check_arrows(events: list[dict[str, Any]]) -> None:
    """Each from one model to the other, forward in time, into a step that had arrivals."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) > 5
    into = {(e["pid"], e["ts"]): e["args"] for e in events if e["name"].endswith("step")}
    for number, start in starts.items():
        end = ends[number]
        assert {start["pid"], end["pid"]} == {1, 2}
        assert start["ts"] < end["ts"]
        assert into[end["pid"], end["ts"]]["arrived_by_handoff"] > 0


async def refusals(instance: Instance, folder: Path) -> None:
    code, words = await trouterctl(instance, "trace", "--model", "medium", "--summary")
    assert (code, words) == (ctl.EXIT_REFUSED, "trouterctl: no model 'medium'; there are small, large\n")
    code, words = await trouterctl(instance, "trace", "--output", str(folder))
    assert (code, words) == (ctl.EXIT_FAILURE, f"trouterctl: {folder}: Is a directory\n")
    link = await Link.open(instance)
    for args, why in (
        ({"seconds": 1e9}, "expected a number from 0.1 to 60"),
        ({"seconds": "long"}, "expected a number"),
        ({}, "expected a number"),
        ({"seconds": 1, "models": "small"}, "a list of names"),
    ):
        reply = await link.call("trace", **args)
        assert reply.refused
        assert why in reply.error
    assert (await link.call("trace-left", trace=1)).refused
    link.writer.close()


async def test_one_at_a_time_and_none_for_ever(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path)) as instance:
        link = await Link.open(instance)
        begun = (await link.call("trace", seconds=60, models=["large"])).result
        assert begun["models"] == {"large": None}
        other = await Link.open(instance)
        refused = await other.call("trace", seconds=1)
        assert refused.refused
        assert "is tracing already (large); one trace at a time" in refused.error
        other.writer.close()
        number = begun["trace"]
        assert (await link.call("trace-read", trace=number, model="small")).refused
        # Ended early, and read to the end; a second look finds nothing.
        stopped = (await link.call("trace-stop", trace=number)).result["large"]
        assert stopped["steps"] == 0
        assert sum(stopped["spent"].values()) == pytest.approx(stopped["end"] - stopped["begin"])
        assert (await link.call("trace-read", trace=number, model="large")).result["left"] == 0
        assert "is not here" in (await link.call("trace-read", trace=number, model="large")).result["error"]
        await link.call("trace-end", trace=number)
        assert (await link.call("trace-left", trace=number)).refused
        await one_dies(link)
        # The next one is abandoned: its client goes away without a word.
        begun = (await link.call("trace", seconds=60)).result
        assert begun["trace"] == number + 2
        link.writer.close()
        await instance.logged("nobody asks for it any more")
        assert list(await instance.ctl("trace", "--seconds", "0.2", "--summary")) == ["small", "large"]


async def processes(link: Link) -> dict[str, Any]:
    return {process["name"]: process for process in (await link.call("status")).result["processes"]}


async def one_dies(link: Link) -> None:
    """A model that dies is named; the other one's part stays."""
    number = (await link.call("trace", seconds=60)).result["trace"]
    os.kill((await processes(link))["large"]["pid"], signal.SIGKILL)
    async with asyncio.timeout(START_TIMEOUT):
        while True:
            assert (await link.call("trace-left", trace=number)).result > 0  # still wanted
            large = (await processes(link))["large"]
            if large["epoch"] == 2 and large["state"] == "up":
                break
            await asyncio.sleep(0.05)
    answers = (await link.call("trace-stop", trace=number)).result
    assert "spent" in answers["small"]
    assert "the process was restarted" in answers["large"]["error"]
    await link.call("trace-end", trace=number)
