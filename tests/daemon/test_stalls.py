"""Models that take long or do not answer: what is ready, what is named, who goes on (C-27, C-30)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.daemon.instance import complete, expected, scripts, serving, stream

LONG = 3000
"""Tokens of a stream that goes on while others are stopped and waited for."""


async def ready_status(session: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
    """GET /ready."""
    async with session.get("/ready") as answer:
        return answer.status, await answer.json()


async def sample(session: aiohttp.ClientSession, line: str) -> float:
    """One value of /metrics."""
    async with asyncio.timeout(30):
        while True:
            async with session.get("/metrics") as answer:
                text = await answer.text()
            # A worker that misses the time that it gets to answer is not there.
            if found := next((one for one in text.splitlines() if one.startswith(line)), ""):
                return float(found.split()[-1])


async def test_c27_long_step_and_probes(tmp_path: Path) -> None:
    """One step far longer than `peer_stall` changes nothing, one longer than `stall_after` does; probes are no work."""
    config = scripts(tmp_path, delay_ms=6000, supervision="heartbeat_interval = 0.1\npeer_stall = 2.0")
    async with serving(tmp_path, config) as daemon, daemon.session() as session:
        answer = asyncio.create_task(complete(session, "small", max_tokens=1))
        while not await sample(session, 'trouterd_requests_running{model="small"}'):
            await asyncio.sleep(0.02)
        probes = await asyncio.gather(*(ready_status(session) for _ in range(100)))
        assert not answer.done()
        assert [status for status, _ in probes] == [200] * 100
        for queue, count in (("running", 1), ("waiting", 0)):
            assert await sample(session, f'trouterd_requests_{queue}{{model="small"}}') == count
        assert (await answer)[0] == 200
        assert await sample(session, 'trouterd_worker_steps_total{model="small"}') == 1
        assert await sample(session, 'trouterd_worker_steps_total{model="large"}') == 0
        assert not any("small" in line and "does not answer" in line for line in daemon.lines)

        # The supervisor has heard that the step is over, or it would be taken for a stall from now on, and nothing be accepted.
        async with asyncio.timeout(30):
            while any(process["step_seconds"] for process in (await daemon.ctl("status"))["processes"]):
                await asyncio.sleep(0.02)
        await daemon.ctl("set", "supervision.stall_after", "0.3")
        answer = asyncio.create_task(complete(session, "small", max_tokens=1))
        async with asyncio.timeout(30):
            while (probe := await ready_status(session))[0] == 200:
                await asyncio.sleep(0.02)
        assert probe[0] == 503
        assert "'small' is stalled" in probe[1]["reason"]
        assert not answer.done()
        assert (await answer)[0] == 200, "a slow step is not given up"
        await daemon.ready()


async def until(response: aiohttp.ClientResponse, text: bytes) -> None:
    """Read until this letter has been streamed."""
    received = b""
    while b'"text":"' + text not in received:
        received += await response.content.readany()


async def admitted(session: aiohttp.ClientSession, **body: Any) -> tuple[int, Any]:
    """As `complete`, again and again while the entry has not yet read what others have sent it through its small ring."""
    while True:
        status, answer = await complete(session, **body)
        if status != 503 or "takes no more requests now" not in answer["error"]["message"]:
            return status, answer


async def test_c30_stopped_peer_behind_a_full_ring(tmp_path: Path) -> None:
    """The entry's I/O goes on, a line names ring, fill, spill, pid and state, routes do what their policy says, and what the
    peer says when it goes on is dropped."""
    config = scripts(
        tmp_path,
        delay_ms=4,
        supervision="heartbeat_interval = 0.1\npeer_stall = 4.0",
        rings="capacity = 65536\nspill_records = 2\nspill_bytes = 65536",
    )
    async with serving(tmp_path, config) as daemon, daemon.session() as session:
        pid = (await daemon.pids())["large"]
        os.kill(pid, signal.SIGSTOP)
        try:
            # One that is pending with the peer, and will still be running when that one goes on.
            body = {"model": "demo", "prompt": "x", "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
            long = await session.post("/v1/completions", json=body | {"stream": True})
            await until(long, b"c")
            prompts = [[65 + n] * 3000 for n in range(10)]
            routed = [asyncio.create_task(admitted(session, max_tokens=12, prompt=prompt)) for prompt in prompts]
            strict = asyncio.create_task(complete(session, "strict", max_tokens=12))
            status, body = await complete(session, "small", max_tokens=12)
            assert (status, body["choices"][0]["text"]) == (200, "abcdefghijkl")
            async with session.get("/health") as answer:
                assert answer.status == 200
            line = await daemon.logged("large", f"pid {pid}", "state T", "ring to large")
            fill, spilled = map(int, re.search(r"(\d+) of 65536 bytes in use, (\d+) messages", line).groups())  # type: ignore[union-attr]
            assert fill > 48_000
            assert spilled == 2
            for status, body in await asyncio.gather(*routed):
                assert status == 200
                assert body["choices"][0]["text"].lower() == expected(12).lower()
                assert body["usage"]["route"]["tokens"] == {"small": 12, "large": 0}
            status, body = await strict
            assert (status, body["error"]["code"]) == (503, "unavailable")
            assert (await ready_status(session))[0] == 503
        finally:
            os.kill(pid, signal.SIGCONT)
        await daemon.ready()
        received = (await long.read()).decode()
        letters = re.findall(r'"text":"(\w+)"', received)
        rest = "".join(letters)
        assert rest.lower() == expected(LONG).lower()[LONG - len(rest) :], "nothing is lost and nothing comes twice"
        assert rest[-40:] == expected(LONG)[-40:], "the peer writes again"
        assert await sample(session, 'trouterd_stale_peer_msgs_total{model="small"}') >= 1
        seen = await stream(session, max_tokens=12)
        assert (seen.text, seen.finish) == (expected(12), "length")
        await daemon.idle()
