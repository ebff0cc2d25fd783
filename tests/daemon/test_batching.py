"""Delayed batching in a whole daemon: lists changed while streams run, and what trouterctl shows of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from tests.daemon.instance import Instance, expected, scripts, serving, stream
from tests.daemon.link import Link

STREAMS = 100
TOKENS = 64


LISTS = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 2], [1, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12]]


async def in_force(link: Link, thresholds: list[int]) -> None:
    """Put a list into force and wait until it is; a worker that is late to answer applies it later."""
    assert not (await link.set("models.large.thresholds", thresholds)).error
    async with asyncio.timeout(30):
        while (await link.model("large"))["thresholds"] != thresholds:
            await asyncio.sleep(0.01)


async def client(session: aiohttp.ClientSession, over: asyncio.Event) -> None:
    """Streams, one after the other, each of them whole."""
    while not over.is_set():
        answer = await stream(session, max_tokens=TOKENS)
        assert (answer.text, answer.finish, answer.done) == (expected(TOKENS), "length", True)


async def test_lists_change_while_a_hundred_streams_run(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=1.0, large_delay_ms=4.0)) as instance:
        link = await Link.open(instance)
        async with instance.session() as session:
            over = asyncio.Event()
            clients = [asyncio.create_task(client(session, over)) for _ in range(STREAMS)]
            while (await link.model("large"))["active"] < STREAMS // 2:
                await asyncio.sleep(0.01)
            assert not (await link.set("batching.mode", "manual")).error
            for wanted in LISTS * 2:
                await in_force(link, wanted)
            over.set()
            await asyncio.gather(*clients)
            assert (await link.model("large"))["reasons"]["threshold"] > 0
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
    await in_force(link, before)
    for key, value, words in (
        ("models.large.thresholds", [2], "2 for 1 active requests"),
        ("models.large.thresholds", [1, 0], "expected int >= 1"),
        ("models.small.thresholds", [1, 2], "all models could wait at once"),
    ):
        reply = await link.set(key, value)
        assert reply.refused
        assert words in reply.error
    assert (await link.model("large"))["thresholds"] == before


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
