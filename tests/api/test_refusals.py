"""What is refused, how it is said, and that nothing of it reaches a worker (C-12, C-17a, bad input, limits)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers as hf

from models.tokenizer import Tokenizer
from tests.api.harness import EOS, Script, chat_body, config, serve
from tests.models.tiny import byte_tokenizer
from trouterd.api import prompt

HI = Script([*b"hi", EOS])
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = 50_000
"""Characters from which on texts take turns, for a test."""


def text_body(**fields: Any) -> dict[str, Any]:
    """A completion request."""
    return {"model": "demo", "prompt": [1]} | fields


BAD_FIELDS = [
    # C-12: ids outside the vocabulary
    (CHAT, chat_body(logit_bias={"999999": 5}), "logit_bias"),
    (CHAT, chat_body(stop_token_ids=[999999]), "stop_token_ids"),
    (TEXT, text_body(prompt=[5, 999999]), "prompt"),
    (TEXT, text_body(prompt=[-1]), "prompt"),
    (TEXT, text_body(prompt=[[1], [2, 1 << 70]]), "prompt"),
    # types and ranges
    (CHAT, chat_body(temperature="hot"), "temperature"),
    (CHAT, chat_body(temperature=2.5), "temperature"),
    (CHAT, chat_body(temperature=-0.1), "temperature"),
    (CHAT, chat_body(top_p=0), "top_p"),
    (CHAT, chat_body(min_p=1.5), "min_p"),
    (CHAT, chat_body(top_k=-2), "top_k"),
    (CHAT, chat_body(max_tokens=0), "max_tokens"),
    (CHAT, chat_body(max_tokens="5"), "max_tokens"),
    (CHAT, chat_body(max_tokens=1.5), "max_tokens"),
    (CHAT, chat_body(max_tokens=True), "max_tokens"),
    (CHAT, chat_body(min_tokens=5, max_tokens=4), "min_tokens"),
    (CHAT, chat_body(n=0), "n"),
    (CHAT, chat_body(seed=1 << 70), "seed"),
    (CHAT, chat_body(stream="yes"), "stream"),
    (CHAT, chat_body(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat_body(stop=""), "stop"),
    (CHAT, chat_body(stop=["a", ""]), "stop"),
    (CHAT, chat_body(stop=[str(number) for number in range(17)]), "stop"),
    (CHAT, chat_body(stop=["a" * 5000]), "stop"),
    (CHAT, chat_body(stop=[1]), "stop[0]"),
    # messages
    (CHAT, chat_body(messages=[]), "messages"),
    (CHAT, chat_body(messages="x"), "messages"),
    (CHAT, {"model": "demo"}, "messages"),
    (CHAT, chat_body(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
    (CHAT, chat_body(messages=[{"role": "user"}]), "messages[0].content"),
    (CHAT, chat_body(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
    (CHAT, chat_body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
    (CHAT, chat_body(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
    (CHAT, chat_body(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (
        CHAT,
        chat_body(continue_final_message=True, messages=[{"role": "user", "content": " "}]),
        "continue_final_message",
    ),
    # prompts
    (TEXT, {"model": "demo"}, "prompt"),
    (TEXT, text_body(prompt=[]), "prompt"),
    (TEXT, text_body(prompt=[[]]), "prompt"),
    (TEXT, text_body(prompt=["a", 1]), "prompt"),
    (TEXT, text_body(prompt=[True]), "prompt"),
    (TEXT, text_body(prompt=[1.5]), "prompt"),
    (TEXT, text_body(prompt=None), "prompt"),
    # the route object
    (CHAT, chat_body(route={"params": {"threshold": 99}}), "route.params"),
    (CHAT, chat_body(route={"params": {"nothing": 1}}), "route.params"),
    (CHAT, chat_body(route={"params": {"threshold": "low"}}), "route.params[...]"),
    (CHAT, chat_body(route={"algorithm": "none"}), "route.algorithm"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}]}, "model"),
]
UNSUPPORTED = [
    (CHAT, {"logprobs": True}),
    (CHAT, {"top_logprobs": 2}),
    (TEXT, {"logprobs": 0}),
    (TEXT, {"echo": True}),
    (TEXT, {"best_of": 2}),
    (TEXT, {"suffix": "x"}),
    (CHAT, {"presence_penalty": 0.5}),
    (CHAT, {"frequency_penalty": -1}),
    (CHAT, {"repetition_penalty": 1.1}),
    (CHAT, {"logit_bias": {"5": 1}}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"tools": [{"type": "function"}]}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"chat_template": "{{ x }}"}),
]
NEUTRAL = {
    "logprobs": False,
    "top_logprobs": None,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "best_of": 1,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "user": "u",
    "metadata": {"a": "b"},
    "max_tokens": None,
    "temperature": None,
    "stop": None,
    "something_new": {"deep": [1]},
}
MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 400 + b"}",
    b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "demo", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "demo", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "demo", "unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "demo", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"model": "demo", "logit_bias": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


async def test_bad_fields_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        for path, body, param in BAD_FIELDS:
            status, answer = await api.post(path, body)
            assert (status, answer["error"]["param"]) == (400, param), (body, answer)
            assert answer["error"]["type"] == "invalid_request_error"
        assert api.workers.submits == []
        assert (await api.chat())[0] == 200


async def test_unsupported_parameters(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        for path, extra in UNSUPPORTED:
            body = chat_body() if path == CHAT else text_body()
            status, answer = await api.post(path, body | extra)
            assert (status, answer["error"]["code"]) == (400, "unsupported_parameter"), extra
            assert answer["error"]["param"] == next(iter(extra))
        assert api.workers.submits == []


async def test_neutral_and_unknown_fields_are_accepted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        for _ in range(2):
            status, answer = await api.chat(**NEUTRAL)
            assert status == 200, answer
        assert api.engine.metrics.unknown_fields == 2
    assert sum("something_new" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: body[:24].decode("latin1") + str(len(body)))
async def test_malformed_bodies(tmp_path: Path, tokenizer: Tokenizer, body: bytes) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        status, answer = await api.post(CHAT, body)
        assert status == 400, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert (await api.chat())[0] == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_body_that_is_not_in_its_coding(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, coding: str
) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        headers = {"Content-Encoding": coding}
        async with api.session.post(f"http://test{CHAT}", data=b'{"model": "small"}', headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "unreadable_body"
        assert (await api.chat())[0] == 200
    assert [record for record in caplog.records if record.name.startswith("trouterd") and record.exc_info] == []


async def test_unknown_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        status, answer = await api.chat(model="gpt-4")
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["param"] == "model"


async def test_paths_methods_and_sizes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI, settings=config(max_body_bytes=2048)) as api:
        assert (await api.get("/v1/nothing"))[1]["error"]["code"] == "not_found"
        status, answer = await api.get(CHAT)
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
        assert "POST" in answer["error"]["message"]
        status, answer = await api.chat(messages=[{"role": "user", "content": "x" * 4096}])
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_unknown_expectation_is_answered(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """aiohttp refuses it before any middleware: the answer is stamped all the same, whatever the path."""
    async with serve(tmp_path, tokenizer, HI) as api:
        for path in (CHAT, "/nosuch"):
            async with api.session.post(f"http://test{path}", data=b"{}", headers={"Expect": "200-later"}) as answer:
                assert answer.status == 417
                assert answer.headers["X-Request-Id"]
                assert answer.headers["Server"] == "trouterd"


async def test_announced_size_is_refused_before_the_body_comes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI, settings=config(max_body_bytes=2048)) as api:
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"body_too_large"' in answer
        assert b"2048" in answer
        writer.close()
        await writer.wait_closed()
        assert (await api.post(TEXT, text_body()))[0] == 200


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"), [(64, None, ("64", "64")), (80, 1, ("80", "64")), (60, 10, ("70", "64"))]
)
async def test_c17a_over_long(
    tmp_path: Path, tokenizer: Tokenizer, length: int, max_tokens: int | None, numbers: tuple[str, str]
) -> None:
    async with serve(tmp_path, tokenizer, HI, contexts={"small": 128, "large": 64}) as api:
        status, answer = await api.post(TEXT, text_body(prompt=[1] * length, max_tokens=max_tokens))
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert all(number in answer["error"]["message"] for number in numbers)
        assert api.workers.submits == []
        # the single model is not bound by its peer's context
        status, _ = await api.post(TEXT, text_body(model="small", prompt=[1] * length, max_tokens=max_tokens))
        assert status == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, text_body(prompt="a " * 200), "prompt"),
        (TEXT, text_body(prompt=["hi", "a " * 200]), "prompt"),
        (CHAT, chat_body(messages=[{"role": "user", "content": "ä" * 200}]), "messages"),
    ],
)
async def test_texts_that_cannot_fit_are_refused_before_they_are_tokenized(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
    async with serve(tmp_path, tokenizer, HI, contexts={"small": 128, "large": 64}) as api:
        status, answer = await api.post(path, body)
        assert status == 400
        error = answer["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "64" in error["message"]
        assert not any(len(text) > 100 for text in encoded)
        assert api.workers.submits == []
        assert (await api.post("/tokenize", {"prompt": "a " * 200}))[0] == 200


async def test_long_texts_that_shrink_are_served(tmp_path: Path) -> None:
    backend = hf.Tokenizer.from_file(str(byte_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"))
    backend.normalizer = hf.normalizers.Strip()
    async with serve(tmp_path, Tokenizer(backend, {}), HI, contexts={"small": 64, "large": 64}) as api:
        status, answer = await api.post(TEXT, text_body(prompt="x" + " " * 10_000))
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == 2


async def test_very_long_texts_are_tokenized_one_at_a_time(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one is held, a shorter one passes and the second very long one does not begin."""
    begun: list[int] = []
    started, go = threading.Event(), threading.Event()

    def encode(text: str, **_: object) -> list[int]:
        begun.append(len(text))
        if len(text) > LONG:
            started.set()
            go.wait(30)
        return [1]

    monkeypatch.setattr(tokenizer, "encode", encode)
    monkeypatch.setattr(prompt, "_LONG_SIZE", LONG)
    async with serve(tmp_path, tokenizer, HI) as api:
        first, second = (
            asyncio.create_task(api.post("/tokenize", {"prompt": "a" * size})) for size in (LONG + 1, LONG + 2)
        )
        try:
            await asyncio.to_thread(started.wait, 30)
            for _ in range(3):
                assert (await api.post("/tokenize", {"prompt": "a" * 10_000}))[0] == 200
            assert sum(size > LONG for size in begun) == 1
        finally:
            go.set()
        assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]
    assert sum(size > LONG for size in begun) == 2


@pytest.mark.parametrize(
    ("fields", "param"), [({"prompt": ["a"] * 9}, "prompt"), ({"prompt": [[1]] * 2, "n": 5}, "n"), ({"n": 9}, "n")]
)
async def test_too_many_choices_are_refused_before_they_are_tokenized(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
    async with serve(tmp_path, tokenizer, HI, settings=config(max_active_requests=8)) as api:
        status, answer = await api.post(TEXT, text_body(**fields))
        assert status == 400
        assert answer["error"]["param"] == param
        assert "more than the 8 requests that may be active" in answer["error"]["message"]
        assert (encoded, api.workers.submits) == ([], [])


async def test_c17a_null_fills_the_context(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script(b"abc", cycle=True)
    async with serve(tmp_path, tokenizer, script, contexts={"small": 128, "large": 64}) as api:
        _, answer = await api.post(TEXT, text_body(prompt=[1] * 60))
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_newer_of_two_limits_wins(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abc", cycle=True)) as api:
        _, answer = await api.chat(max_tokens=50, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_bad_request_leaves_a_good_one_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script([*b"ab", EOS], gate_at=1)
    async with (
        serve(tmp_path, tokenizer, script) as api,
        api.session.post(f"http://test{CHAT}", json=chat_body(stream=True)) as response,
    ):
        received = await response.content.readany()
        for path, body, _ in BAD_FIELDS[:4]:
            assert (await api.post(path, body))[0] == 400
        script.gate.set()
        received += await response.content.read()
    assert b'"finish_reason":"stop"' in received


async def test_defaults_and_mapping_of_sampling(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        await api.chat()
        await api.chat(
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.1,
            seed=-1,
            max_tokens=9,
            min_tokens=2,
            stop_token_ids=[5, 5, 6],
            ignore_eos=True,
            route={"params": {"threshold": 0.4}},
        )
        await api.chat(top_k=-1)
        plain, full, off = api.workers.submits
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.top_k) == (1.0, 1.0, 0)
    assert plain.params == {}
    assert full.sampling.seed == (1 << 64) - 1
    assert (full.sampling.temperature, full.sampling.top_p, full.sampling.top_k, full.sampling.min_p) == (
        0,
        0.5,
        7,
        0.1,
    )
    assert (full.sampling.max_tokens, full.sampling.min_tokens) == (9, 2)
    assert full.sampling.stop_token_ids == (5, 6)
    assert full.sampling.ignore_eos
    assert full.params == {"threshold": 0.4}
    assert off.sampling.top_k == 0
    assert plain.sampling.seed != off.sampling.seed


async def test_internal_errors_do_not_leak(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        monkeypatch.setattr(api.catalog, "get", lambda name: 1 // 0)
        status, answer = await api.chat()
    assert status == 500
    assert "ZeroDivision" not in str(answer)
    assert answer["error"]["code"] == "internal_error"
    assert any(record.exc_info for record in caplog.records)
