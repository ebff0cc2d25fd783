"""What clients read: characters, stop strings, finish reasons (C-01, C-02, C-06, C-14)."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from tests.api.harness import EOS, Script, serve

EMOJI = [0xF0, 0x9F, 0x98, 0x80]


@pytest.mark.parametrize("per_update", [1, 2, 8])
async def test_c01_character_over_four_tokens(tmp_path: Path, tokenizer: Tokenizer, per_update: int) -> None:
    async with serve(tmp_path, tokenizer, Script([*EMOJI, EOS], per_update=per_update)) as api:
        stream = await api.chat_stream(stream_options={"include_usage": True})
    assert stream.text() == "😀"
    assert "\ufffd" not in stream.raw
    assert stream.finishes() == ["stop"]
    assert stream.events[-1]["usage"]["completion_tokens"] == 5


async def test_c01_cut_character_is_flushed_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script([0x41, 0xE4, 0xBD, 0xA0, EOS])) as api:
        stream = await api.chat_stream(max_tokens=3)
        _, whole = await api.chat(max_tokens=3)
    assert stream.text() == "A\ufffd"
    assert whole["choices"][0]["message"]["content"] == "A\ufffd"
    assert stream.finishes() == ["length"]
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_c01_character_over_a_handoff(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script([*EMOJI, EOS], writer=lambda index: 1 if index in (2, 3) else 0, handoffs=2)
    async with serve(tmp_path, tokenizer, script) as api:
        stream = await api.chat_stream(stream_options={"include_usage": True})
    assert stream.text() == "😀"
    assert stream.events[-1]["usage"]["route"] == {
        "handoffs": 2,
        "tokens": {"small": 3, "large": 2},
        "pending_ms": 0.0,
        "forwards": {"small": 0, "large": 0},
        "drafted": 0,
        "accepted": 0,
    }


@pytest.mark.parametrize("per_update", [1, 3, 12])
async def test_c02_stop_string_over_tokens(tmp_path: Path, tokenizer: Tokenizer, per_update: int) -> None:
    script = Script(b"ABCDEFGHIJKL", per_update=per_update, writer=lambda index: int(index > 5))
    async with serve(tmp_path, tokenizer, script) as api:
        stream = await api.chat_stream(stop=["DEFGHIJ"], stream_options={"include_usage": True})
        _, whole = await api.chat(stop="DEFGHIJ")
    assert stream.text() == "ABC"
    assert whole["choices"][0]["message"]["content"] == "ABC"
    assert stream.finishes() == ["stop"]
    for usage in (stream.events[-1]["usage"], whole["usage"]):
        assert usage["completion_tokens"] == 10
        assert usage["route"]["tokens"] == {"small": 6, "large": 4}
    assert all("D" not in choice["delta"].get("content", "") for e in stream.events for choice in e["choices"])


async def test_c02_hold_back_is_released(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"ABCDEFX")) as api:
        stream = await api.chat_stream(stop=["DEFGHIJ"])
        held_to_the_end = await api.chat_stream(stop=["FXY"])
    assert stream.text() == "ABCDEFX"
    assert held_to_the_end.text() == "ABCDEFX"
    assert stream.finishes() == ["stop"]


async def test_c02_stop_string_aborts_the_worker(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abc", cycle=True)) as api:
        stream = await api.chat_stream(stop=["cab"], max_tokens=1000)
        (submit,) = api.workers.submits
        assert stream.text() == "ab"
        assert api.workers.aborts == [submit.rid]
        assert api.workers.played[submit.rid] < 20
        assert api.engine.metrics.finished["stop", "demo"] == 1


async def test_stop_string_can_be_included(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"one two three")) as api:
        _, whole = await api.chat(stop=[" three", "two"], include_stop_str_in_output=True)
    assert whole["choices"][0]["message"]["content"] == "one two"


async def test_stop_strings_do_not_count_before_min_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"abab")) as api:
        _, whole = await api.chat(stop=["b"], min_tokens=2)
    assert whole["choices"][0]["message"]["content"] == "aba"
    assert whole["usage"]["completion_tokens"] == 4


async def test_c06_finish_reasons_and_shape(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script(b"hello")) as api:
        long = await api.chat_stream(max_tokens=3)
        api.workers.script = Script([*b"hi", EOS])
        short = await api.chat_stream()
    assert long.finishes() == ["length"]
    assert short.finishes() == ["stop"]
    for stream in (long, short):
        assert {event["object"] for event in stream.events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in stream.events}) == 1
        assert stream.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in event["choices"][0]["delta"] for event in stream.events) == 1
        assert stream.done


@pytest.mark.parametrize(
    ("fields", "text", "finish", "tokens"),
    [
        ({}, "a", "stop", 2),
        ({"ignore_eos": True, "max_tokens": 6}, "a\nbcd", "length", 6),
        ({"ignore_eos": True, "stop_token_ids": [10]}, "a", "stop", 2),
    ],
)
async def test_c14_end_tokens(
    tmp_path: Path, tokenizer: Tokenizer, fields: dict[str, object], text: str, finish: str, tokens: int
) -> None:
    script = Script([*b"a\nb", EOS, *b"cd"], eos_ids=frozenset({EOS, 10}))
    async with serve(tmp_path, tokenizer, script) as api:
        _, whole = await api.chat(**fields)
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["finish_reason"] == finish
    assert whole["usage"]["completion_tokens"] == tokens


async def test_special_tokens_are_shown_on_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script([256, *b"a"])) as api:
        _, hidden = await api.chat()
        _, shown = await api.chat(skip_special_tokens=False)
    assert hidden["choices"][0]["message"]["content"] == "a"
    assert shown["choices"][0]["message"]["content"] == "<s>a"


async def test_token_ids_and_writers_on_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = Script([*EMOJI, *b"ab", EOS], writer=lambda index: index % 2)
    names = ["small", "large", "small", "large", "small", "large", "small"]
    async with serve(tmp_path, tokenizer, script) as api:
        stream = await api.chat_stream(return_token_ids=True)
        _, whole = await api.post("/v1/completions", {"model": "demo", "prompt": "p", "return_token_ids": True})
    choices = [event["choices"][0] for event in stream.events[1:]]
    assert [token for choice in choices for token in choice["token_ids"]] == [*EMOJI, *b"ab", EOS]
    assert [name for choice in choices for name in choice["models"]] == names
    assert whole["choices"][0]["token_ids"] == [*EMOJI, *b"ab", EOS]
    assert whole["choices"][0]["models"] == names
