"""How the daemon ends, and when it refuses to begin (C-32, R-5)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from tests.daemon.instance import Instance, launch, scripts, serving
from tests.models.tiny import byte_tokenizer

BUSY = 10
"""A host that runs other tests meanwhile may be this much slower than the bounds, which are for an idle one, allow. What would end
the daemon otherwise, its `drain_timeout` of 30 s and streams of 20 s and more, takes still longer."""


async def begin(session: aiohttp.ClientSession, model: str, tokens: int) -> aiohttp.ClientResponse:
    """A stream whose first three tokens have come."""
    body = {"model": model, "prompt": "x", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    response = await session.post("/v1/completions", json=body)
    received = b""
    while received.count(b"data: ") < 3:
        received += await response.content.readany()
    return response


async def ended(daemon: Instance) -> float:
    """Wait for the end; CLOCK_MONOTONIC."""
    await daemon.process.wait()
    return time.monotonic()


async def test_c32_drain(tmp_path: Path) -> None:
    """Two streams of 1 s, one of them pending with the peer, come to their ends; nothing new is taken."""
    config = scripts(tmp_path, delay_ms=10, large_delay_ms=1000)
    async with serving(tmp_path, config) as daemon, daemon.session() as session, daemon.session() as late:
        async with late.get("/health"):
            pass
        alone, pending = await asyncio.gather(begin(session, "small", 100), begin(session, "demo", 4))
        end = asyncio.create_task(ended(daemon))
        daemon.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        while True:  # its connection is open before the listener closes
            async with late.get("/ready") as answer:
                if answer.status == 503:
                    break
        async with late.post("/v1/completions", json={"model": "small", "prompt": "x", "max_tokens": 1}) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["code"] == "draining"
        for response in (alone, pending):
            rest = (await response.read()).decode()
            assert '"finish_reason":"length"' in rest
            assert rest.endswith("data: [DONE]\n\n")
        assert await end - told < BUSY * 2.0
        assert daemon.process.returncode == 0


async def test_c32_second_signal(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=5)) as daemon, daemon.session() as session:
        streams = [await begin(session, model, 4000) for model in ("small", "demo")]
        end = asyncio.create_task(ended(daemon))
        daemon.process.send_signal(signal.SIGTERM)
        await daemon.logged("drain")
        assert not end.done()
        daemon.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        for response in streams:
            rest = (await response.read()).decode()
            assert '"code":"shutdown"' in rest
            assert rest.endswith("data: [DONE]\n\n")
        assert await end - told < BUSY * 0.5
        assert daemon.process.returncode == 1


async def test_answers_that_fail_in_the_drain_are_told(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=5)) as daemon, daemon.session() as session:
        pids = await daemon.pids()
        lost, whole = await asyncio.gather(begin(session, "small", 4000), begin(session, "large", 100))
        async with daemon.session() as late:
            async with late.get("/health"):
                pass
            daemon.process.send_signal(signal.SIGTERM)
            while True:  # until the api drains
                async with late.get("/ready") as answer:
                    if answer.status == 503:
                        break
        os.kill(pids["small"], signal.SIGKILL)
        assert '"code":"worker_lost"' in (await lost.read()).decode()
        assert '"finish_reason":"length"' in (await whole.read()).decode()
        assert await daemon.process.wait() == 1
        await daemon.logged("drain: 1 answer failed")


@pytest.mark.slow
async def test_c32_drain_timeout(tmp_path: Path) -> None:
    config = scripts(tmp_path, delay_ms=5, large_delay_ms=3000, server="drain_timeout = 1.0")
    async with serving(tmp_path, config) as daemon, daemon.session() as session:
        streams = [await begin(session, model, 4000) for model in ("small", "demo")]
        end = asyncio.create_task(ended(daemon))
        daemon.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        for response in streams:
            rest = (await response.read()).decode()
            assert '"code":"shutdown"' in rest
            assert rest.endswith("data: [DONE]\n\n")
        assert await end - told < BUSY * 1.0
        assert daemon.process.returncode == 1
        await daemon.logged("stopped before every answer was finished")


async def test_r05_different_tokenizers_refuse_to_start(tmp_path: Path) -> None:
    config = scripts(tmp_path)
    other = byte_tokenizer(tmp_path / "other", extra=("<think>",))
    large = config.index("[models.large]")
    config = config[:large] + config[large:].replace(str(tmp_path / "tokenizer"), str(other), 1)
    daemon = await launch(tmp_path, config)
    _, errors = await daemon.process.communicate()
    assert daemon.process.returncode == 78
    line = errors.decode().strip().splitlines()[-1]
    assert "'small' and 'large'" in line
    assert "258" in line
