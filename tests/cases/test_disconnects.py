"""Clients that go away, wherever their request is, and late messages about it (C-19, R-1, R-2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from operator import le
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ipc.messages import Abort, Message, PeerReq
from models.tokenizer import Tokenizer
from tests.api.harness import Client
from tests.cases.stack import LARGE, SMALL, TEXT, Gate, Stack, chunks, eventually, route, samples, script, visits
from trouterd.worker.gauges import gauges

ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
STALE = ("stale_peer_msgs_total", "model=small")
ABORTED = ("request_success_total", "finished_reason=abort", "model=demo")


def endless(letter: str, **settings: Any) -> Any:
    """A runner that writes one letter for ever."""
    return script(lambda _index: ord(letter), context_length=8192, **settings)


@asynccontextmanager
async def leaving(client: Client, **fields: Any) -> AsyncIterator[asyncio.Task[aiohttp.ClientResponse]]:
    """A request on a connection of its own, which is cut when the block is left."""
    body = {"model": "demo", "prompt": "x", "stream": True, "temperature": 0} | ENDLESS | fields
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(client.socket))) as session:
        request = asyncio.create_task(session.post(f"http://test{TEXT}", json=body))
        yield request
        if request.done():
            request.result().close()
        else:
            request.cancel()
            await asyncio.wait({request})


async def nothing_left(stack: Stack, client: Client, stale: int = 0) -> None:
    """Both workers are empty, pages balance, one abort is counted, and late messages only in their own counter."""
    await stack.settled()
    counted = await samples(client)
    for name in stack.names:
        for queue in ("running", "waiting", "pending", "away"):
            assert counted[f"requests_{queue}", f"model={name}"] == 0
    assert counted[ABORTED] == 1
    assert counted["worker_finished_total", "finished_reason=abort", "model=small"] == 1
    assert counted[STALE] == stale
    assert counted["stale_peer_msgs_total", "model=large"] == 0


async def test_c19a_decoding_on_the_entry(tmp_path: Path, tokenizer: Tokenizer) -> None:
    runners = {"small": endless("a", delay_ms=1), "large": endless("b")}
    stack = Stack(runners, {"demo": route()}, tokenizer)
    async with stack.serving(tmp_path) as client:
        async with leaving(client) as request:
            await chunks(await request, 3)
        await nothing_left(stack, client)


async def test_c19b_pending_with_the_peer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The peer is inside a step when the client goes; its reply is too late."""
    peer = Gate(endless("b"), before=2)  # after the warm prefill and one visit, or two visits
    stack = Stack({"small": endless("a"), "large": peer}, visits(4), tokenizer)
    aborts = asyncio.Event()

    def watch(_source: int, target: int, message: Message) -> bool:
        if target == SMALL and isinstance(message, Abort):
            aborts.set()
        return True

    stack.accept = watch
    async with stack.serving(tmp_path) as client:
        async with leaving(client) as request:
            await chunks(await request, 3)
            await peer.reached.wait()
            assert gauges(stack.small)["requests_pending"] == 1
        await aborts.wait()
        await eventually(stack.small.idle.is_set)
        assert stack.small.kv.counts()["owned"] == 0, "the entry does not wait for its peer"
        peer.open()
        await nothing_left(stack, client, stale=1)


async def test_c19c_waiting(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """One that has no room yet goes away; the one that has the room does not notice."""
    stack = Stack({"small": endless("a", delay_ms=1), "large": endless("b")}, {"demo": route()}, tokenizer, max_slots=1)
    async with stack.serving(tmp_path) as client:
        first = asyncio.create_task(client.post(TEXT, {"model": "demo", "prompt": "y", "max_tokens": 200}))
        await eventually(lambda: gauges(stack.small)["requests_running"])
        async with leaving(client):
            await eventually(lambda: gauges(stack.small)["requests_waiting"])
        await eventually(lambda: not gauges(stack.small)["requests_waiting"])
        assert not first.done()
        assert (await first)[1]["choices"][0]["text"] == "a" * 200
        await nothing_left(stack, client)


@pytest.mark.parametrize("name", ["demo", "small"])
async def test_c19d_mid_chunked_prefill(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    """With a route, the peer is in the middle of its own prefill of the same prompt."""
    entry, peer = Gate(endless("a"), before=4), Gate(endless("b"), before=2 if name == "demo" else 0)
    stack = Stack({"small": entry, "large": peer}, visits(4), tokenizer, max_batch_tokens=16)
    async with stack.serving(tmp_path) as client:
        async with leaving(client, model=name, prompt="x" * 400):
            await entry.reached.wait()
            if name == "demo":
                await peer.reached.wait()
            (request,) = stack.small.requests.values()
            assert 0 < request.fed < request.prompt_length
        await eventually(lambda: client.engine.active == 0)
        entry.open()
        peer.open()
        await stack.settled()
        assert (await samples(client))["request_success_total", "finished_reason=abort", f"model={name}"] == 1
        assert entry.steps == 5
        assert stack.small.stats.tokens == stack.large.stats.tokens == 0
        if name == "small":
            assert stack.small.kv.counts()["cached"] == 5 * 16 // stack.small.kv.page_size


@pytest.mark.parametrize("pending", [False, True])
async def test_c19e_without_streaming(tmp_path: Path, tokenizer: Tokenizer, pending: bool) -> None:
    stack = Stack({"small": endless("a", delay_ms=1), "large": endless("b")}, visits(4), tokenizer)
    if pending:
        stack.hold = lambda source, _, message: source == LARGE and isinstance(message, PeerReq)
    async with stack.serving(tmp_path) as client:
        async with leaving(client, stream=False, n=1):
            await eventually(lambda: stack.held if pending else stack.small.stats.tokens > 10)
        await stack.settled()
        stale = (await samples(client))[STALE]
        stack.release()
        await stack.settled()
        await eventually(lambda: stack.small.stats.stale_messages == stale + pending)
        assert (await samples(client))[ABORTED] == 1


def held() -> tuple[int, int]:
    """Tasks and open descriptors of this process."""
    return len(asyncio.all_tasks()), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("rounds", [24, pytest.param(200, marks=pytest.mark.slow)])
async def test_c19_repeated(tmp_path: Path, tokenizer: Tokenizer, rounds: int) -> None:
    """Neither tasks nor descriptors nor pages are left of any of them."""
    settings: dict[str, Any] = {"max_batch_tokens": 16, "max_slots": 2, "prefix_cache": False}
    stack = Stack({"small": endless("a", delay_ms=0.2), "large": endless("b")}, visits(3), tokenizer, **settings)
    async with stack.serving(tmp_path) as client:
        most = (0, 0)
        for number in range(rounds):
            async with leaving(
                client, stream=number % 4 > 0, n=1 + number % 3, prompt="x" * (1 + 50 * (number % 5))
            ) as request:
                if number % 4 > 1:
                    await chunks(await request, number % 6 + 1)
                else:
                    await eventually(lambda: stack.small.requests)
            await stack.settled()
            await eventually(lambda: not client.engine.report())
            for worker in stack.workers.values():
                assert worker.kv.counts()["free"] == worker.kv.counts()["total"]
            if 4 <= number < 12:
                most = tuple(map(max, most, held()))
            elif number >= 12:
                # The server lets go of a connection when it gets to it.
                await eventually(lambda most=most: all(map(le, held(), most)))
        assert (await samples(client))[ABORTED] == sum(1 + number % 3 for number in range(rounds))


async def test_r01_late_reply_for_a_recycled_slot(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The reply to a request whose client is gone comes while another one is pending in the same slot."""
    stack = Stack({"small": script(b"abcdef"), "large": script(b"ABCDEF")}, visits(2), tokenizer, max_slots=1)
    stack.hold = lambda source, _, message: source == LARGE and isinstance(message, PeerReq)
    async with stack.serving(tmp_path) as client:
        async with leaving(client):
            await eventually(lambda: stack.held)
        await stack.settled()
        (late,) = stack.held
        other = asyncio.create_task(client.post(TEXT, {"model": "demo", "prompt": "y", "return_token_ids": True}))
        await eventually(lambda: len(stack.held) == 2)
        (request,) = stack.small.requests.values()
        assert request.slot == 0
        numbers = [message.handoff_seq for *_, message in stack.held if isinstance(message, PeerReq)]
        assert numbers == [2, 2], "the sequence number alone does not tell them apart"
        stack.deliver(SMALL, late[2])
        await eventually(lambda: stack.small.stats.stale_messages == 1)
        assert not other.done()
        stack.held.remove(late)
        stack.release()
        _, answer = await other
        assert answer["choices"][0]["text"] == "aBcDeF"
        assert answer["usage"]["route"]["tokens"] == {"small": 4, "large": 3}
        await nothing_left(stack, client, stale=1)


def at_once(stack: Stack) -> Callable[[int, int, Message], bool]:
    """Every hand-off comes twice in a row."""

    def hold(_source: int, target: int, message: Message) -> bool:
        if isinstance(message, PeerReq):
            stack.deliver(target, message)
        return False

    return hold


def one_visit_later(stack: Stack) -> Callable[[int, int, Message], bool]:
    """Every hand-off comes again in front of the next one to the same worker, which then waits for that one."""
    previous: dict[int, Message] = {}

    def hold(_source: int, target: int, message: Message) -> bool:
        if isinstance(message, PeerReq):
            if target in previous:
                stack.deliver(target, previous[target])
            previous[target] = message
        return False

    return hold


@pytest.mark.parametrize(("repeat", "stale"), [(at_once, 6), (one_visit_later, 4)])
async def test_r02_repeated_messages(
    tmp_path: Path,
    tokenizer: Tokenizer,
    repeat: Callable[[Stack], Callable[[int, int, Message], bool]],
    stale: int,
) -> None:
    stack = Stack({"small": script(b"abcdef"), "large": script(b"ABCDEF")}, visits(2), tokenizer)
    stack.hold = repeat(stack)
    async with stack.serving(tmp_path) as client:
        stream = await client.stream(TEXT, {"model": "demo", "prompt": "y", "stream_options": {"include_usage": True}})
        assert stream.text() == "aBcDeF"
        usage = stream.events[-1]["usage"]
        assert usage["completion_tokens"] == 7
        assert usage["route"]["tokens"] == {"small": 4, "large": 3}
        assert usage["route"]["handoffs"] == 6
        await eventually(lambda: stack.small.stats.stale_messages + stack.large.stats.stale_messages == stale)
