"""Events, usage chunks, errors and choices (C-04, C-07, C-08), keep-alive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from models.tokenizer import Tokenizer
from tests.api.harness import EOS, Script, chat_body, config, parse_stream, serve

HI = Script([*b"hi", EOS])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_c04_no_usage_unless_asked(tmp_path: Path, tokenizer: Tokenizer, options: dict[str, Any] | None) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        stream = await api.chat_stream(stream_options=options)
    assert stream.done
    assert all(event.get("usage") is None for event in stream.events)
    assert all(len(event["choices"]) == 1 for event in stream.events)


async def test_c04_one_usage_chunk_when_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        chat = await api.chat_stream(stream_options={"include_usage": True})
        text = await api.stream(
            "/v1/completions", {"model": "demo", "prompt": [1, 2], "stream_options": {"include_usage": True}}
        )
    for stream in (chat, text):
        *others, last = stream.events
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3
        assert all("usage" in event and event["usage"] is None and len(event["choices"]) == 1 for event in others)
    assert text.events[-1]["usage"]["prompt_tokens"] == 2


async def test_continuous_usage(tmp_path: Path, tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve(tmp_path, tokenizer, HI) as api:
        stream = await api.chat_stream(stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in stream.events[1:]] == [1, 2, 3, 3]


async def test_continuous_usage_shows_tokens_without_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The first half of a character is a token that has been made, though nothing can be shown of it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve(tmp_path, tokenizer, Script([*"é".encode(), EOS], handoffs=2)) as api:
        shown = await api.chat_stream(stream_options=options)
        silent = await api.chat_stream(stream_options={"include_usage": True})
    assert [event["usage"]["completion_tokens"] for event in shown.events[1:]] == [1, 2, 3, 3]
    assert shown.text() == silent.text() == "é"
    assert len(silent.events) == len(shown.events) - 1
    assert shown.events[1]["usage"]["route"]["handoffs"] == 2
    assert shown.events[-1]["usage"] == silent.events[-1]["usage"]


async def test_c07_failure_before_the_first_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abcdef", fail_at=0)) as api:
        for stream in (True, False):
            status, body = await api.post("/v1/chat/completions", chat_body(stream=stream))
            assert status == 500
            assert body["error"]["code"] == "engine_error"
        assert api.engine.active == 0


async def test_c07_failure_inside_a_stream(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abcdef", fail_at=3)) as api:
        stream = await api.chat_stream()
        assert stream.status == 200
        assert [e["choices"][0]["delta"]["content"] for e in stream.chunks] == ["", "a", "b", "c"]
        assert stream.events[-1]["error"]["message"] == api.workers.script.error
        assert "error" not in stream.events[-2]
        assert stream.done
        assert stream.finishes() == []
        assert api.engine.active == 0
        assert api.engine.metrics.finished["error", "demo"] == 1


@pytest.mark.parametrize("fail_at", [0, 3])
async def test_c07_failure_that_comes_with_tokens(tmp_path: Path, tokenizer: Tokenizer, fail_at: int) -> None:
    """They are streamed, and the answer has failed all the same."""
    script = Script(b"abcdef", fail_at=fail_at, fail_with=b"xy", status=503)
    async with serve(tmp_path, tokenizer, script) as api:
        status, body = await api.post("/v1/chat/completions", chat_body())
        assert (status, body["error"]["code"]) == (503, "unavailable")
        stream = await api.chat_stream(stream_options={"include_usage": True})
        text = "".join(e["choices"][0]["delta"]["content"] for e in stream.chunks)
        assert text == "abcdef"[:fail_at] + "xy"
        assert stream.events[-1]["error"]["message"] == script.error
        assert stream.done
        assert stream.finishes() == []
        assert api.engine.active == 0
        assert api.engine.metrics.finished == {("error", "demo"): 2}


async def test_connection_is_closed_after_an_error_frame(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abc", fail_at=1)) as api:
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        body = b'{"model":"demo","stream":true,"prompt":[1]}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = await reader.read()  # returns at end of file only
        writer.close()
        await writer.wait_closed()
    assert b"data: [DONE]" in answer
    assert answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (503, "unavailable"), (500, "engine_error")])
async def test_worker_chooses_the_status(tmp_path: Path, tokenizer: Tokenizer, status: int, code: str) -> None:
    async with serve(tmp_path, tokenizer, Script(b"a", fail_at=0, status=status, error="why")) as api:
        answered, body = await api.chat()
    assert answered == status
    assert body["error"]["code"] == code
    assert body["error"]["message"] == "why"


async def test_c08_whole_answer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        status, body = await api.chat(stream=False)
        _, two = await api.chat(n=2, seed=7)
    assert status == 200
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "hi"
    assert body["usage"]["prompt_tokens"] > 0
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["usage"]["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert two["usage"]["completion_tokens"] == 6
    first, second = api.workers.submits[1:]
    assert (first.sampling.choice, second.sampling.choice) == (0, 1)
    assert first.sampling.seed == second.sampling.seed == 7
    assert first.rid != second.rid


async def test_n_choices_are_streamed_by_index(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        stream = await api.chat_stream(n=3)
    for index in range(3):
        assert stream.text(index) == "hi"
        assert stream.finishes(index) == ["stop"]
    assert len({event["id"] for event in stream.events}) == 1


async def test_prompts_times_choices(tmp_path: Path, tokenizer: Tokenizer) -> None:
    body = {"model": "demo", "prompt": ["a", "bc"], "n": 2}
    async with serve(tmp_path, tokenizer, HI) as api:
        _, whole = await api.post("/v1/completions", body)
        submits = api.workers.submits
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [submit.sampling.choice for submit in submits] == [0, 1, 0, 1]
    assert submits[0].prompt == submits[1].prompt != submits[2].prompt == submits[3].prompt
    assert whole["usage"]["prompt_tokens"] == 2 + 3  # each with BOS, each counted once


async def test_one_stop_does_not_end_the_other_choice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abcd")) as api:
        _, whole = await api.chat(n=2, stop="c", return_token_ids=True)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["ab", "ab"]
    assert [choice["token_ids"] for choice in whole["choices"]] == [list(b"abc"), list(b"abc")]


async def test_updates_that_arrived_together_are_one_write(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        serve(tmp_path, tokenizer, Script(b"abcdefgh", burst=True)) as api,
        api.session.post("http://test/v1/chat/completions", json=chat_body(stream=True)) as response,
    ):
        pieces = [chunk async for chunk, _ in response.content.iter_chunks()]
    assert len(pieces) == 1
    assert parse_stream(200, {}, pieces[0].decode()).text() == "abcdefgh"


async def test_keep_alive_comments_while_nothing_comes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script([*b"ab", EOS], gate_at=1)
    async with (
        serve(tmp_path, tokenizer, script, settings=config(keepalive_interval=0.02)) as api,
        api.session.post("http://test/v1/chat/completions", json=chat_body(stream=True)) as response,
    ):
        received = b""
        while received.count(b": keep-alive\n\n") < 2:
            received += await response.content.readany()
        script.gate.set()
        received += await response.content.read()
    stream = parse_stream(200, {}, received.decode())
    assert stream.comments >= 2
    assert stream.text() == "ab"
    assert stream.done


async def test_request_id_travels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        given = {"X-Request-Id": "my-id.1"}
        async with api.session.post("http://test/v1/chat/completions", json=chat_body(), headers=given) as response:
            assert response.headers["X-Request-Id"] == "my-id.1"
            assert (await response.json())["id"] == "chatcmpl-my-id.1"
        given = {"X-Request-Id": "x" * 200}
        async with api.session.get("http://test/nowhere", headers=given) as response:
            assert response.headers["X-Request-Id"] != "x" * 200
            assert len(response.headers["X-Request-Id"]) == 32
        async with api.session.post(
            "http://test/v1/chat/completions", json=chat_body(stream=True, request_id="in-body")
        ) as response:
            assert response.headers["X-Request-Id"] == "in-body"
            assert "chatcmpl-in-body" in await response.text()
