"""Delayed batching in a whole daemon: lists changed while streams run, and what trouterctl shows of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.daemon.instance import Instance, expected, scripts, serving, stream
from trouterd import ctl

STREAMS = 100
TOKENS = 48


async def refused(instance: Instance, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trouterd.ctl", "--control", str(instance.control), *arguments),
        stderr=subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == ctl.EXIT_REFUSED
    return errors.decode()


async def test_lists_change_while_a_hundred_streams_run(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, scripts(tmp_path, delay_ms=1.0, large_delay_ms=4.0)) as instance,
        instance.session() as session,
    ):
        streams = [asyncio.create_task(stream(session, max_tokens=TOKENS)) for _ in range(STREAMS)]
        for large in ("1,2,3,4,5,6,7,8", "1,1,1,2", "1,2,2,4,4,6,6,8,8,10,10,12,13,13"):
            changed = await instance.ctl("batching", "set", "large", large)
            assert (changed["key"], changed["new"], changed["pending"]) == ("batching.mode", "manual", [])
            shown = (await instance.ctl("batching", "show"))["models"]
            assert shown["large"]["thresholds"] == [int(part) for part in large.split(",")]
            assert shown["small"]["thresholds"] == []
        text = await refused(instance, "batching", "set", "large", "2")
        assert "2 for 1 active requests" in text
        text = await refused(instance, "batching", "set", "small", "1,2,2,2,2,2,2,2")
        assert "all models could wait at once" in text
        await instance.ctl("batching", "linger", "large", "7.5")
        shown = (await instance.ctl("batching", "show"))["models"]["large"]
        assert shown["linger_ms"] == 7.5
        assert shown["thresholds"][-1] == 13
        top = await instance.ctl("top", "--once", "--interval", "0.1")
        assert {"batch", "threshold", "queue", "pending", "tokens_per_second", "handoffs_per_second"} <= set(
            top["models"]["large"]
        )
        answers = await asyncio.gather(*streams)
        assert {(answer.text, answer.finish, answer.done) for answer in answers} == {(expected(TOKENS), "length", True)}
        await instance.ctl("batching", "eager")
        assert (await instance.ctl("batching", "show"))["models"]["large"]["thresholds"] == []
        async with session.get("/metrics") as answer:
            metrics = await answer.text()
        assert 'trouterd_batching_launches_total{model="large",reason="threshold"}' in metrics
        assert 'trouterd_batching_measured_tokens_per_second{group="small"}' in metrics
        assert await instance.stop() == 0
