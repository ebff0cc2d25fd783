"""Delayed batching in a whole daemon: lists changed while streams run, and what trouterctl shows of it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from tests.daemon.instance import Instance, expected, scripts, serving, stream
from trouterd.control import Call, Reply, pack_frame, read_frame

STREAMS = 100
TOKENS = 64


class Link:
    """A control connection: faster than one trouterctl for every call, so that streams are still under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, instance: Instance) -> Link:
        return cls(*await asyncio.open_unix_connection(str(instance.control)))

    async def call(self, verb: str, **args: Any) -> Reply:
        self.writer.write(pack_frame(Call(id=1, verb=verb, args=args)))
        reply = await read_frame(self.reader)
        assert isinstance(reply, Reply)
        return reply

    async def set(self, key: str, value: Any) -> Reply:
        return await self.call("set", key=key, value=value)

    async def large(self) -> dict[str, Any]:
        """What the large model launches by."""
        shown: dict[str, Any] = (await self.call("batching")).result["models"]["large"]
        return shown


async def test_lists_change_while_a_hundred_streams_run(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=1.0, large_delay_ms=4.0)) as instance:
        link = await Link.open(instance)
        async with instance.session() as session:
            streams = [asyncio.create_task(stream(session, max_tokens=TOKENS)) for _ in range(STREAMS)]
            while (await link.large())["active"] < STREAMS // 2:
                await asyncio.sleep(0.01)
            assert not (await link.set("batching.mode", "manual")).error
            lists = itertools.cycle([[1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 2], [1, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12]])
            changes = 0
            while not any(task.done() for task in streams):
                wanted = next(lists)
                assert not (await link.set("models.large.thresholds", wanted)).error
                assert (await link.large())["thresholds"] == wanted
                changes += 1
            assert changes > 3
            answers = await asyncio.gather(*streams)
            assert {(answer.text, answer.finish, answer.done) for answer in answers} == {
                (expected(TOKENS), "length", True)
            }
            assert (await link.large())["reasons"]["threshold"] > 0
            async with session.get("/metrics") as answer:
                metrics = await answer.text()
        assert 'trouterd_batching_launches_total{model="large",reason="threshold"}' in metrics
        assert 'trouterd_worker_busy_seconds_total{model="large"}' in metrics
        assert 'trouterd_batching_measured_tokens_per_second{group="small"}' in metrics
        await refusals(link)
        link.writer.close()
        await commands(instance)
        assert await instance.stop() == 0


async def refusals(link: Link) -> None:
    """Invalid lists: the reason is given, and the old one stays."""
    before = [1, 2, 3, 4]
    assert not (await link.set("models.large.thresholds", before)).error
    for key, value, words in (
        ("models.large.thresholds", [2], "2 for 1 active requests"),
        ("models.large.thresholds", [1, 0], "expected int >= 1"),
        ("models.small.thresholds", [1, 2], "all models could wait at once"),
    ):
        reply = await link.set(key, value)
        assert reply.refused
        assert words in reply.error
    assert (await link.large())["thresholds"] == before


async def commands(instance: Instance) -> None:
    await instance.ctl("batching", "linger", "large", "7.5")
    await instance.ctl("batching", "set", "large", "1,2,2,3")
    shown = await instance.ctl("batching", "show")
    large = shown["models"]["large"]
    assert (large["mode"], large["thresholds"], large["threshold"], large["linger_ms"]) == (
        "manual",
        [1, 2, 2, 3],
        1,
        7.5,
    )
    assert [group["models"] for group in shown["controller"]["groups"]] == [["small", "large"]]
    top = await instance.ctl("top", "--once", "--interval", "0.1")
    assert {"batch", "threshold", "queue", "pending", "tokens_per_second", "handoffs_per_second"} <= set(
        top["models"]["large"]
    )
    await instance.ctl("batching", "eager")
    assert (await instance.ctl("batching", "show"))["models"]["large"]["thresholds"] == []
