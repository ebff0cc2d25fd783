"""Disconnects, many streams, lost workers, limits and shutdown (C-19, C-20, C-27, C-32)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from ipc.messages import TokenUpdate, pack_ids
from models.tokenizer import Tokenizer
from tests.api.harness import EOS, Endpoint, Script, chat_body, config, serve
from trouterd.api.loading import ParamChecks
from trouterd.api.scores import Scores
from trouterd.api.verbs import Verbs
from trouterd.child import Refused

CHAT = "http://test/v1/chat/completions"
HI = Script([*b"hi", EOS])


async def all_aborted(api: Endpoint, count: int) -> None:
    """Wait for `count` aborts."""
    while len(api.workers.aborts) < count:
        api.workers.aborted.clear()
        await api.workers.aborted.wait()


@pytest.mark.parametrize("gate_at", [None, 0, 3], ids=["streaming", "before the first token", "pending"])
@pytest.mark.parametrize("stream", [True, False])
async def test_c19_disconnect_aborts_every_choice(
    tmp_path: Path, tokenizer: Tokenizer, gate_at: int | None, stream: bool
) -> None:
    script = Script(b"abc", cycle=True, gate_at=gate_at)
    async with serve(tmp_path, tokenizer, script) as api:
        body = chat_body(stream=stream, n=3, max_tokens=4000)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(api.socket))) as session:
            request = asyncio.create_task(session.post(CHAT, json=body))
            if stream and gate_at != 0:
                await (await request).content.readany()
            while len(api.workers.submits) < 3:
                await asyncio.sleep(0)
            if request.done():
                request.result().close()
            else:
                request.cancel()
                await asyncio.wait({request})
        await all_aborted(api, 3)
        assert sorted(api.workers.aborts) == sorted(submit.rid for submit in api.workers.submits)
        assert api.engine.active == 0
        assert api.engine.report() == []
        assert api.engine.metrics.finished["abort", "demo"] == 3
        for rid in api.workers.aborts:  # what was on its way
            api.workers.deliver("small", _late(rid))
        assert api.engine.metrics.stale_updates == 3


def _late(rid: int) -> TokenUpdate:
    return TokenUpdate(rid, 0, pack_ids([1]), b"\0")


async def test_c19_repeated_disconnects_leave_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abc", cycle=True)) as api:
        connector = aiohttp.UnixConnector(path=str(api.socket))
        tasks = 0
        async with aiohttp.ClientSession(connector=connector) as session:
            for round_number in range(50):
                async with session.post(CHAT, json=chat_body(stream=True, max_tokens=4000)) as response:
                    await response.content.readany()
                    response.close()
                await all_aborted(api, round_number + 1)
                if round_number == 9:
                    tasks = len(asyncio.all_tasks())
            assert len(asyncio.all_tasks()) <= tasks + 2
        assert api.engine.active == 0


async def test_c20_many_streams_all_complete(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script(b"abcdefghijklmnopqrs")  # 19 and EOS
    async with serve(tmp_path, tokenizer, script) as api:
        streams = await asyncio.gather(*(api.chat_stream() for _ in range(512)))
    assert all(stream.text() == "abcdefghijklmnopqrs" and stream.done for stream in streams)
    assert all(stream.finishes() == ["stop"] for stream in streams)
    assert api.workers.aborts == []
    assert api.engine.metrics.finished["stop", "demo"] == 512


async def test_c27_a_lost_peer_turns_ready_but_not_health(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI, up=False) as api:
        status, body = await api.get("/ready")
        assert status == 503
        assert "'small' is starting" in body["reason"]
        assert (await api.chat())[0] == 503
        api.report("small", "up")
        api.report("large", "up")
        assert (await api.get("/ready"))[0] == 200
        api.report("large", "down")
        status, body = await api.get("/ready")
        assert status == 503
        assert "'large' is down" in body["reason"]
        status, body = await api.get("/health")
        assert status == 200
        assert body["workers"]["large"]["state"] == "down"
        assert (await api.chat())[0] == 200, "the entry goes on alone"
        assert (await api.chat(model="large"))[0] == 503
        api.report("large", "up", epoch=2)
        assert (await api.get("/ready"))[0] == 200


async def test_c27_probes_reach_no_worker(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        await asyncio.gather(*(api.get(path) for _ in range(50) for path in ("/health", "/ready")))
    assert api.workers.submits == []


async def test_route_that_needs_its_peers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = config()
    settings.routes["demo"] = type(settings.routes["demo"])(models=["small", "large"], on_peer_loss="fail")
    async with serve(tmp_path, tokenizer, HI, settings=settings) as api:
        api.report("large", "down")
        status, body = await api.chat()
    assert status == 503
    assert "'large'" in body["error"]["message"]


@pytest.mark.parametrize("state", ["down", "restarted"])
async def test_loss_of_the_entry_ends_its_streams(tmp_path: Path, tokenizer: Tokenizer, state: str) -> None:
    script = Script(b"abc", gate_at=2)
    async with serve(tmp_path, tokenizer, script) as api:
        async with api.session.post(CHAT, json=chat_body(stream=True)) as response:
            received = await response.content.readany()
            api.report("small", "up" if state == "restarted" else "down", epoch=2)
            received += await response.content.read()
        assert b'"code":"worker_lost"' in received
        assert received.endswith(b"data: [DONE]\n\n")
        assert api.engine.active == 0
        assert api.workers.aborts == []


async def test_stalled_entry_refuses_new_and_keeps_running(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script([*b"ab", EOS], gate_at=1)
    async with serve(tmp_path, tokenizer, script) as api:
        running = asyncio.create_task(api.chat())
        while not api.workers.submits:
            await asyncio.sleep(0)
        api.report("small", "stalled")
        status, body = await api.chat()
        assert status == 503
        assert "'small' is stalled" in body["error"]["message"]
        api.report("small", "up")
        script.gate.set()
        status, body = await running
    assert (status, body["choices"][0]["message"]["content"]) == (200, "ab")


async def test_limits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script([*b"ab", EOS], gate_at=1)
    async with serve(tmp_path, tokenizer, script, settings=config(max_active_requests=3)) as api:
        running = asyncio.create_task(api.chat(n=2))
        while len(api.workers.submits) < 2:
            await asyncio.sleep(0)
        async with api.session.post(CHAT, json=chat_body(n=2)) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "overloaded"
        api.engine.configure(config(max_active_requests=4))
        script.gate.set()
        assert (await api.chat(n=2))[0] == 200
        assert (await running)[0] == 200
        status, body = await api.chat(n=5)
        assert (status, body["error"]["param"]) == (400, "n"), "more than ever fits"


async def test_full_ring_is_503_and_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        api.workers.full = True
        status, body = await api.chat()
        assert status == 503
        assert "'small'" in body["error"]["message"]
        api.workers.full = False
        assert api.engine.active == 0
        assert (await api.chat())[0] == 200


async def test_abort_that_found_no_room_is_sent_later(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abc", cycle=True), settings=config(keepalive_interval=0.02)) as api:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(api.socket))) as session:
            response = await session.post(CHAT, json=chat_body(stream=True, max_tokens=4000))
            api.workers.full = True
            response.close()
        while api.engine.report():
            await asyncio.sleep(0)
        api.workers.full = False
        await all_aborted(api, 1)


async def test_c32_drain_lets_streams_finish(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script([*b"ab", EOS], gate_at=1)
    async with serve(tmp_path, tokenizer, script) as api:
        verbs = Verbs(api.engine, api.catalog, ParamChecks(config()), Scores(config()))
        running = [asyncio.create_task(api.chat_stream()) for _ in range(2)]
        while len(api.workers.submits) < 2:
            await asyncio.sleep(0)
        drain = asyncio.create_task(verbs.drain({"timeout": 30.0}))
        await asyncio.sleep(0)
        async with api.session.post(CHAT, json=chat_body()) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
        assert (await api.get("/ready"))[0] == 503
        assert not drain.done()
        script.gate.set()
        for stream in await asyncio.gather(*running):
            assert stream.text() == "ab"
            assert stream.done
        assert await drain == {"cut": 0, "failed": 0}


async def test_c32_drain_timeout_sends_error_frames(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script(b"abc", gate_at=1)
    async with serve(tmp_path, tokenizer, script) as api:
        verbs = Verbs(api.engine, api.catalog, ParamChecks(config()), Scores(config()))
        stream, whole = asyncio.create_task(api.chat_stream()), asyncio.create_task(api.chat())
        while len(api.workers.submits) < 2:
            await asyncio.sleep(0)
        assert await verbs.drain({"timeout": 0.0}) == {"cut": 2, "failed": 0}
        ended = await stream
        status, body = await whole
    assert ended.events[-1]["error"]["code"] == "shutdown"
    assert ended.done
    assert (status, body["error"]["code"]) == (503, "shutdown")
    assert len(api.workers.aborts) == 2


async def test_verbs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script(b"abc", gate_at=2)
    async with serve(tmp_path, tokenizer, script) as api:
        verbs = Verbs(api.engine, api.catalog, ParamChecks(config()), Scores(config()))
        running = asyncio.create_task(
            api.post("/v1/chat/completions", chat_body(), headers={"X-Request-Id": "find-me"})
        )
        while not api.workers.played:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        (entry,) = await verbs.requests({})
        assert entry["id"] == "find-me"
        assert entry["route"] == "demo"
        assert "x" not in entry.values()
        assert (await verbs.status({}))["active"] == 1
        with pytest.raises(Refused, match="nobody"):
            await verbs.abort({"id": "nobody"})
        assert await verbs.abort({"id": "chatcmpl-find-me"}) == {"aborted": 1}
        status, body = await running
        assert (status, body["error"]["code"]) == (503, "aborted")
        assert api.engine.metrics.finished["abort", "demo"] == 1
        await verbs.set({"key": "server.max_active_requests", "value": 1, "config": config(max_active_requests=1)})
        assert (await api.chat(n=2))[0] == 400
