"""A step that fails, before the first token and inside a stream (C-07)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from models.tokenizer import Tokenizer
from tests.api.harness import Client
from tests.cases.stack import TEXT, Stack, route, samples, script, visits
from trouterd.config import Route


def failing(tokenizer: Tokenizer, at: int, routes: dict[str, Route] | None = None, *, peer: bool = False) -> Stack:
    """A stack whose small (or large) model fails at one output index."""
    runners = {
        "small": script(b"abcdef", fail_at=None if peer else at),
        "large": script(b"ABCDEF", fail_at=at if peer else None),
    }
    return Stack(runners, routes or {"demo": route()}, tokenizer)


async def survives(stack: Stack, client: Client) -> None:
    """No request is left and the same worker goes on."""
    await stack.settled()
    assert (await samples(client))["requests_running", "model=small"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_c07_failure_before_the_first_token(tmp_path: Path, tokenizer: Tokenizer, stream: bool) -> None:
    stack = failing(tokenizer, 0)
    async with stack.serving(tmp_path) as client:
        status, body = await client.post(TEXT, {"model": "demo", "prompt": "x", "stream": stream})
        assert status == 500
        assert body["error"]["code"] == "engine_error"
        await survives(stack, client)
        assert (await client.post(TEXT, {"model": "large", "prompt": "x"}))[1]["choices"][0]["text"] == "ABCDEF"


async def test_c07_failure_inside_a_stream(tmp_path: Path, tokenizer: Tokenizer) -> None:
    stack = failing(tokenizer, 3)
    async with stack.serving(tmp_path) as client:
        stream = await client.stream(TEXT, {"model": "demo", "prompt": "x"})
        assert stream.status == 200
        assert [event["choices"][0]["text"] for event in stream.chunks] == ["a", "b", "c"]
        assert len(stream.events) == 4
        assert stream.events[-1]["error"]["code"] == "engine_error"
        assert stream.done
        assert stream.finishes() == []
        await survives(stack, client)
        _, whole = await client.post(TEXT, {"model": "demo", "prompt": "x", "max_tokens": 3})
        assert whole["choices"][0]["text"] == "abc"
        counted = await samples(client)
        assert counted["request_success_total", "finished_reason=error", "model=demo"] == 1


async def test_c07_connection_is_closed_after_the_error_frame(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with failing(tokenizer, 3).serving(tmp_path) as client:
        reader, writer = await asyncio.open_unix_connection(str(client.socket))
        body = b'{"model":"demo","stream":true,"prompt":"x"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = await reader.read()  # returns at end of file only
        writer.close()
        await writer.wait_closed()
    assert answer.count(b'"text":') == 3
    assert b'"error":' in answer
    assert b"data: [DONE]" in answer


async def test_c07_failure_of_one_batch_leaves_other_requests_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Requests whose rows are not in the failing step do not notice: one of a model of its own, one that is not there yet."""
    stack = failing(tokenizer, 3)
    async with stack.serving(tmp_path) as client:
        lost, other = await asyncio.gather(
            client.post(TEXT, {"model": "demo", "prompt": "x"}), client.post(TEXT, {"model": "large", "prompt": "x"})
        )
        assert lost[0] == 500
        assert other[1]["choices"][0]["text"] == "ABCDEF"


@pytest.mark.parametrize("policy", ["fallback", "fail"])
async def test_c07_failure_on_the_peer(tmp_path: Path, tokenizer: Tokenizer, policy: str) -> None:
    """The entry goes on alone, or the client is told that a model of the route is not available."""
    visit = visits(2)["demo"]
    stack = failing(tokenizer, 3, {"demo": msgspec.structs.replace(visit, on_peer_loss=policy)}, peer=True)
    async with stack.serving(tmp_path) as client:
        status, body = await client.post(TEXT, {"model": "demo", "prompt": "x", "return_token_ids": True})
        if policy == "fallback":
            assert body["choices"][0]["text"] == "aBcdeF"
        else:
            assert (status, body["error"]["code"]) == (503, "unavailable")
            assert "not available" in body["error"]["message"]
        await survives(stack, client)
