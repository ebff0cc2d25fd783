"""The whole daemon in its processes: deaths, stalls, draining, live settings, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.daemon.instance import (
    START_TIMEOUT,
    Instance,
    Streamed,
    complete,
    expected,
    gone,
    launch,
    scripts,
    serving,
    shared_segments,
    stream,
)
from tests.daemon.link import Link

ASK = 'models = ["small", "large"]\nalgorithm = "query"\nparams = { source = "field", threshold = 0.5 }'
MIX = 'models = ["small", "large"]\nalgorithm = "me"\nparams = { weights = [1, 1] }'


async def one_decision_per_request(session: aiohttp.ClientSession) -> None:
    for model, score, strong in (("ask", 0.5, True), ("ask", 0.4, False), ("router-ask-0.4", 0.4, True)):
        seen = await stream(session, model, max_tokens=12, route={"score": score})
        assert (seen.text, seen.done) == ("ABCDEFGHIJKL" if strong else "abcdefghijkl", True)
        assert seen.usage is not None
        assert seen.usage["route"]["tokens"] == {"small": 12 * (not strong), "large": 12 * strong}
        assert seen.usage["route"]["handoffs"] == strong
    status, body = await complete(session, "ask")
    assert (status, body["error"]["param"]) == (400, "route.score")


async def one_decision_per_token(daemon: Instance, session: aiohttp.ClientSession) -> None:
    _, body = await complete(session, "mix.2", max_tokens=400, seed=1)
    assert abs(body["usage"]["route"]["tokens"]["large"] - 200) < 50
    assert (await daemon.ctl("set", "routes.mix.2.params.weights", "[0, 2]"))["new"] == [0, 2]
    _, body = await complete(session, "mix.2", max_tokens=12)
    assert body["choices"][0]["text"] == "ABCDEFGHIJKL"
    _, body = await complete(session, "mix.2", max_tokens=12, route={"params": {"weights": [1, 0]}})
    assert body["choices"][0]["text"] == "abcdefghijkl"
    status, body = await complete(session, "mix.2", route={"params": {"weights": [1, 0, 1]}})
    assert (status, body["error"]["param"]) == (400, "route.params")
    assert "3 given for 2 models" in body["error"]["message"]


async def test_answers_and_usage(tmp_path: Path) -> None:
    config = scripts(tmp_path, **{"routes.ask": ASK, 'routes."mix.2"': MIX})
    async with serving(tmp_path, config) as daemon, daemon.session() as session:
        status, body = await complete(session, max_tokens=12)
        assert status == 200
        assert body["choices"][0]["text"] == expected(12) == "abcDefgHijkL"
        assert body["usage"]["completion_tokens"] == 12
        assert body["usage"]["route"]["tokens"] == {"small": 9, "large": 3}
        assert body["usage"]["route"]["handoffs"] == 5
        seen = await stream(session, max_tokens=12)
        assert (seen.text, seen.finish, seen.done) == (expected(12), "length", True)
        assert seen.usage is not None
        assert seen.usage["route"]["tokens"] == {"small": 9, "large": 3}
        await one_decision_per_request(session)
        await one_decision_per_token(daemon, session)
        await daemon.idle()
        assert await daemon.stop() == 0
    assert not shared_segments(daemon)


async def test_dead_worker_is_named_and_comes_back(tmp_path: Path) -> None:
    """C-27a: liveness stays, readiness names the dead one; then it is restarted."""
    async with serving(tmp_path, scripts(tmp_path)) as daemon, daemon.session() as session:
        pids = await daemon.pids()
        os.kill(pids["large"], signal.SIGKILL)
        async with asyncio.timeout(START_TIMEOUT):
            while True:
                async with session.get("/ready") as answer:
                    if answer.status == 503:
                        assert "large" in await answer.text()
                        break
                await asyncio.sleep(0.01)
        async with session.get("/health") as answer:
            assert answer.status == 200
        # The route falls back to its entry, a model of its own is refused by name.
        status, body = await complete(session, "demo")
        assert status == 200
        status, body = await complete(session, "large")
        if status == 503:
            assert "large" in body["error"]["message"]
        await daemon.ready()
        status, body = await complete(session, max_tokens=12)
        assert body["choices"][0]["text"] == expected(12)
        again = await daemon.pids()
        assert again["large"] != pids["large"]
        assert again["small"] == pids["small"]
        await daemon.idle()


async def under_way(session: aiohttp.ClientSession, *models: str, max_tokens: int) -> list[asyncio.Task[Streamed]]:
    """A stream of each model, when all of them have begun."""
    begun = [asyncio.Event() for _ in models]
    tasks = [
        asyncio.create_task(stream(session, model, begun=event, max_tokens=max_tokens))
        for model, event in zip(models, begun, strict=True)
    ]
    async with asyncio.timeout(30):
        for event in begun:
            await event.wait()
    return tasks


async def test_dead_peer_in_the_middle_of_streams(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=2)) as daemon, daemon.session() as session:
        pid = (await daemon.pids())["large"]
        tasks = await under_way(session, *("demo" if i % 2 else "strict" for i in range(16)), max_tokens=600)
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        for i, seen in enumerate(answers):
            assert seen.done or seen.error
            if i % 2:
                assert (seen.finish, len(seen.text)) == ("length", 600)
                assert seen.text.lower() == expected(600).lower()
            else:
                assert seen.error is not None or seen.finish == "length"
        assert any(a.error for a in answers)
        await daemon.ready()
        await daemon.idle()


async def test_dead_entry_ends_its_streams_with_an_error_frame(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=2)) as daemon, daemon.session() as session:
        pid = (await daemon.pids())["small"]
        tasks = await under_way(session, *["demo"] * 8, max_tokens=2000)
        os.kill(pid, signal.SIGKILL)
        for seen in await asyncio.gather(*tasks):
            assert seen.error is not None
            assert "small" in seen.error["message"]
        await daemon.ready()
        status, body = await complete(session, max_tokens=12)
        assert (status, body["choices"][0]["text"]) == (200, expected(12))
        await daemon.idle()


async def test_dead_api_comes_back_on_the_same_socket(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=2)) as daemon:
        async with daemon.session() as session:
            pids = await daemon.pids()
            (lost,) = await under_way(session, "demo", max_tokens=2000)
            os.kill(pids["api"], signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                await lost
        # The listening socket never closed: a request that comes now waits for the new api.
        async with daemon.session() as session, session.get("/health") as answer:
            assert answer.status == 200
        await daemon.ready()
        async with daemon.session() as session:
            status, body = await complete(session, max_tokens=12)
            assert (status, body["choices"][0]["text"]) == (200, expected(12))
        again = await daemon.pids()
        assert (again["small"], again["large"]) == (pids["small"], pids["large"])
        await daemon.idle()


async def test_children_die_with_the_supervisor_and_the_socket_is_free(tmp_path: Path) -> None:
    """C-28: also a worker that sits in a blocking call of 1 s."""
    config = scripts(tmp_path, delay_ms=1000)
    async with serving(tmp_path, config) as daemon, daemon.session() as session:
        pids = (await daemon.pids()).values()
        request = asyncio.create_task(complete(session))
        while not (await daemon.workers())["small"]["requests_active"]:
            await asyncio.sleep(0.05)
        daemon.process.kill()
        await gone(pids)
        # The api may still say so before it is killed, or not.
        with contextlib.suppress(aiohttp.ClientError):
            status, body = await request
            assert status == 503, body
        await daemon.process.wait()
    assert not shared_segments(daemon)
    async with serving(tmp_path, scripts(tmp_path)) as daemon, daemon.session() as session:
        status, body = await complete(session, max_tokens=12)
        assert (status, body["choices"][0]["text"]) == (200, expected(12))


async def test_live_threshold_during_streams(tmp_path: Path) -> None:
    """R-9: applied at a step boundary, refused values change nothing, nothing is dropped."""
    async with serving(tmp_path, scripts(tmp_path, delay_ms=15)) as daemon, daemon.session() as session:
        link = await Link.open(daemon)
        tasks = [asyncio.create_task(stream(session, max_tokens=300)) for _ in range(100)]
        while (await link.model("small"))["active"] < 100:
            await asyncio.sleep(0.01)
        assert (await link.set("routes.demo.params.n", 2)).result["new"] == 2
        link.writer.close()
        for seen in await asyncio.gather(*tasks):
            assert (seen.finish, len(seen.text)) == ("length", 300)
            assert seen.text.lower() == expected(300).lower()
            assert seen.text.endswith(expected(300, n=2)[-20:])
        with pytest.raises(AssertionError, match="n"):
            await daemon.ctl("set", "routes.demo.params.n", "0")
        _, body = await complete(session, max_tokens=12)
        assert body["choices"][0]["text"] == expected(12, n=2)
        assert any("routes.demo.params.n" in line and "4" in line and "2" in line for line in daemon.lines)
        await daemon.idle()


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
async def test_clients_that_go_away(tmp_path: Path, rounds: int) -> None:
    """C-19: nothing is left of them on either side."""
    async with serving(tmp_path, scripts(tmp_path, delay_ms=2)) as daemon, daemon.session() as session:
        for number in range(rounds):
            await stream(session, max_tokens=4000, stop_after=number % 7)
        await daemon.idle()
        async with session.get("/metrics") as answer:
            text = await answer.text()
        line = next(x for x in text.splitlines() if x.startswith("trouterd_request_success_total") and "abort" in x)
        assert float(line.split()[-1]) == rounds


async def storm(daemon: Instance, streams: int, kills: int, seed: int) -> None:
    """Concurrent streams with random aborts while workers are killed."""
    dice = random.Random(seed)
    outcomes = {"finished": 0, "error": 0, "left": 0}

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in range(4):
            leave = dice.randrange(1, 40) if dice.random() < 0.3 else None
            count = dice.randrange(1, 120)
            seen = await stream(
                session, dice.choice(["demo", "strict", "small", "large"]), max_tokens=count, stop_after=leave
            )
            if seen.error is not None:
                outcomes["error"] += 1
                await asyncio.sleep(dice.random() * 0.3)
            elif seen.finish:
                assert len(seen.text) == count
                assert seen.text.lower() == expected(count).lower()
                outcomes["finished"] += 1
            else:
                assert leave is not None, "a stream without finish and without error"
                outcomes["left"] += 1

    async def killer() -> None:
        for _ in range(kills):
            await asyncio.sleep(0.5 + dice.random())
            await daemon.kill(dice.choice(["small", "large"]))
            await daemon.ready()

    # The server closes a connection after an error frame, which a client that reuses it would find out too late.
    async with daemon.session(force_close=True) as session:
        await asyncio.gather(killer(), *(client(session) for _ in range(streams)))
    assert outcomes["finished"] > 0
    await daemon.ready()
    await daemon.idle()


@pytest.mark.parametrize(
    ("streams", "kills"), [(64, 1), pytest.param(64, 20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_storm(tmp_path: Path, streams: int, kills: int) -> None:
    async with serving(tmp_path, scripts(tmp_path, delay_ms=2, supervision="restart_backoff = 0.1")) as daemon:
        await storm(daemon, streams, kills, seed=streams + kills)


@pytest.mark.parametrize("streams", [128, pytest.param(512, marks=pytest.mark.slow)])
async def test_no_false_disconnects(tmp_path: Path, streams: int) -> None:
    """C-20."""
    config = scripts(tmp_path, delay_ms=1, server="max_active_requests = 600")
    async with serving(tmp_path, config) as daemon, daemon.session() as session:
        answers = await asyncio.gather(*(stream(session, max_tokens=20) for _ in range(streams)))
        assert all((a.finish, a.text, a.done) == ("length", expected(20), True) for a in answers)
        await daemon.idle()


async def test_socket_that_is_in_use(tmp_path: Path) -> None:
    async with serving(tmp_path, scripts(tmp_path)) as daemon:
        second = await launch(tmp_path, scripts(tmp_path))
        _, errors = await second.process.communicate()
        assert second.process.returncode not in (0, None)
        line = errors.decode().strip().splitlines()[-1]
        assert str(daemon.socket) in line or str(daemon.control) in line
        async with daemon.session() as session:
            status, _ = await complete(session)
            assert status == 200
