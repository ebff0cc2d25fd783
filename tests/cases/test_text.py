"""What clients read: characters, stop strings, usage, finish reasons, choices (C-01, C-02, C-04, C-06, C-08, C-14)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from models.script import Step
from models.tokenizer import Tokenizer
from tests.api.harness import Client, Stream
from tests.cases.stack import VOCAB, Stack, blocks, route, script, visits
from tests.models.tiny import EOS
from trouterd.config import Route

EMOJI = [0xF0, 0x9F, 0x98, 0x80]
USAGE = {"stream_options": {"include_usage": True}}


def stack(
    tokenizer: Tokenizer,
    small: Sequence[Step],
    large: Sequence[Step] = (),
    routes: dict[str, Route] | None = None,
    **settings: Any,
) -> Stack:
    runners = {"small": script(small), "large": script(large)}
    return Stack(runners, routes or {"demo": route()}, tokenizer, **settings)


async def both(client: Client, **fields: Any) -> tuple[Stream, dict[str, Any], dict[str, Any]]:
    """The same request streamed and whole, which must agree: the stream, the whole choice, the usage."""
    stream = await client.chat_stream(**fields, **USAGE)
    status, whole = await client.chat(**fields)
    assert status == 200
    assert stream.done
    (choice,) = whole["choices"]
    assert stream.text() == choice["message"]["content"]
    assert stream.finishes() == [choice["finish_reason"]]
    usage = {key: value for key, value in whole["usage"].items() if key != "route"}
    assert {key: stream.events[-1]["usage"][key] for key in usage} == usage
    assert stream.events[-1]["usage"]["route"]["tokens"] == whole["usage"]["route"]["tokens"]
    return stream, choice, whole["usage"]


async def test_c01_character_over_four_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, EMOJI).serving(tmp_path) as client:
        stream, choice, usage = await both(client)
    assert stream.text() == "😀"
    assert "\ufffd" not in stream.raw
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] == 5


async def test_c01b_cut_character_is_flushed_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, [0x41, 0xE4, 0xBD, 0xA0]).serving(tmp_path) as client:
        stream, choice, usage = await both(client, max_tokens=3)
    assert stream.text() == "A\ufffd"
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 3


async def test_c01c_character_over_a_handoff(tmp_path: Path, tokenizer: Tokenizer) -> None:
    small, large = [*EMOJI[:2], 1, 1], [1, 1, *EMOJI[2:]]
    async with stack(tokenizer, small, large, blocks(2)).serving(tmp_path) as client:
        stream, _, usage = await both(client)
    assert stream.text() == "😀"
    assert "\ufffd" not in stream.raw
    assert usage["route"]["tokens"] == {"small": 3, "large": 2}
    assert usage["route"]["handoffs"] == 2


STOP = "DEFGHIJ"
LETTERS = b"ABCDEFGHIJKL"


@pytest.mark.parametrize("handoff", [False, True], ids=["one model", "hand-off between F and G"])
async def test_c02_stop_string_over_tokens(tmp_path: Path, tokenizer: Tokenizer, handoff: bool) -> None:
    small = [*LETTERS[:6], *b"xxxxxx"] if handoff else LETTERS
    full = stack(tokenizer, small, [*b"xxxxxx", *LETTERS[6:]], blocks(6) if handoff else None)
    async with full.serving(tmp_path) as client:
        stream, choice, usage = await both(client, stop=[STOP])
        assert stream.text() == "ABC"
        assert choice["finish_reason"] == "stop"
        assert "D" not in "".join(e["choices"][0]["delta"].get("content", "") for e in stream.events[:-1])
        assert usage["completion_tokens"] == 10
        assert usage["route"]["tokens"] == ({"small": 6, "large": 4} if handoff else {"small": 10, "large": 0})
        assert full.engine.metrics.finished["stop", "demo"] == 2


@pytest.mark.parametrize("delay_ms", [0.0, 1.0], ids=["steps in the loop", "steps in a thread"])
async def test_c02_surplus_is_bounded(tmp_path: Path, tokenizer: Tokenizer, delay_ms: float) -> None:
    """The worker decodes on only while tokens and abort are under way: what is queued, and one step."""
    runners = {"small": script([*LETTERS, *b"." * 500], delay_ms=delay_ms), "large": script(())}
    full = Stack(runners, {"demo": route()}, tokenizer)
    async with full.serving(tmp_path) as client:
        for number in range(1, 11):
            _, whole = await client.chat(stop=[STOP], max_tokens=400)
            assert whole["usage"]["completion_tokens"] == 10
            await full.settled()
            assert full.small.stats.tokens <= 11 * number


async def test_c02_hold_back_is_released(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, b"ABCDEFX").serving(tmp_path) as client:
        stream, choice, usage = await both(client, stop=[STOP])
    assert stream.text() == "ABCDEFX"
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] == 8


@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}], ids=["absent", "empty", "asked"])
async def test_c04_usage_chunk(tmp_path: Path, tokenizer: Tokenizer, options: dict[str, Any] | None) -> None:
    fields = {} if options is None else {"stream_options": options}
    async with stack(tokenizer, b"hi").serving(tmp_path) as client:
        stream = await client.chat_stream(**fields)
    assert stream.done
    if not options:
        assert all(event.get("usage") is None and len(event["choices"]) == 1 for event in stream.events)
        return
    *others, last = stream.events
    assert all("usage" in event and event["usage"] is None and len(event["choices"]) == 1 for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert stream.raw.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("ids", "fields", "finish", "content"),
    [(b"hello", {"max_tokens": 3}, "length", "hel"), (b"hi", {}, "stop", "hi")],
    ids=["length", "stop"],
)
async def test_c06_shape_of_a_stream(
    tmp_path: Path, tokenizer: Tokenizer, ids: bytes, fields: dict[str, Any], finish: str, content: str
) -> None:
    async with stack(tokenizer, ids).serving(tmp_path) as client:
        stream = await client.chat_stream(n=2, **fields)
    assert {event["object"] for event in stream.events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in stream.events}) == 1
    for index in range(2):
        choices = [c for event in stream.events for c in event["choices"] if c["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert stream.finishes(index) == [finish]
        assert choices[-1]["finish_reason"] == finish
        assert stream.text(index) == content


async def test_c08_whole_answers_and_choices(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, b"hi", b"HI", visits(2)).serving(tmp_path) as client:
        status, whole = await client.chat(stream=False)
        assert status == 200
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "hI", "refusal": None}
        assert whole["usage"]["completion_tokens"] == 3
        _, two = await client.chat(n=2)
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in two["choices"]] == [
        (0, "hI", "stop"),
        (1, "hI", "stop"),
    ]
    assert two["usage"]["completion_tokens"] == 6
    assert two["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def _row(best: int, second: int) -> list[float]:
    """Logits with a second choice, for positions whose best id may be forbidden."""
    row = [0.0] * VOCAB
    row[best], row[second] = 9.0, 8.0
    return row


C14 = [*b"a", _row(10, ord("x")), *b"b", EOS, *b"cd"]
C14_CASES = [
    ({}, [97, 10], "a", "stop"),
    ({"ignore_eos": True, "max_tokens": 6}, [97, 10, 98, EOS, 99, 100], "a\nbcd", "length"),
    ({"ignore_eos": True, "stop_token_ids": [10]}, [97, 10], "a", "stop"),
    ({"min_tokens": 3}, [97, 120, 98, EOS], "axb", "stop"),
    ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [10, 98]}, [97, 120, 98], "ax", "stop"),
]


@pytest.mark.parametrize("routes", [{"demo": route()}, visits(2), blocks(2)], ids=["one model", "visits", "blocks"])
@pytest.mark.parametrize(("fields", "ids", "text", "finish"), C14_CASES, ids=[str(case[0]) for case in C14_CASES])
async def test_c14_end_tokens(
    tmp_path: Path,
    tokenizer: Tokenizer,
    routes: dict[str, Route],
    fields: dict[str, Any],
    ids: list[int],
    text: str,
    finish: str,
) -> None:
    """Counts are of the answer, whoever writes its tokens; with a route, both peers meet the forbidden ids."""
    full = stack(tokenizer, C14, C14, routes, eos_ids=frozenset({EOS, 10}))
    async with full.serving(tmp_path) as client:
        _, whole = await client.chat(temperature=0, return_token_ids=True, **fields)
    (choice,) = whole["choices"]
    assert choice["token_ids"] == ids
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == finish
    assert whole["usage"]["completion_tokens"] == len(ids)


async def test_stop_string_in_accepted_drafts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The drafts behind it are no part of the answer, nor are those that the large model has not verified."""
    routes = {"demo": route("speculative", gamma=5)}
    for large in (LETTERS, b"ABCDEFGHXJKL"):
        async with stack(tokenizer, LETTERS, large, routes).serving(tmp_path) as client:
            stream, choice, usage = await both(client, stop="EFG", max_tokens=12)
        assert stream.text() == "ABCD"
        assert choice["finish_reason"] == "stop"
        # A to E and G are drafts, F is the large model's own behind the first round.
        assert usage["route"]["tokens"] == {"small": 6, "large": 1}
    async with stack(tokenizer, LETTERS, b"ABCXEFGHIJKL", routes).serving(tmp_path) as client:
        stream, choice, usage = await both(client, stop="EFG", max_tokens=12)
    assert stream.text() == "ABCX"
    assert usage["route"]["tokens"] == {"small": 6, "large": 1}


async def test_choices_of_one_prompt_by_drafts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """n answers share the prompt's pages and each has its own drafts."""
    routes = {"demo": route("speculative", gamma=3)}
    async with stack(tokenizer, LETTERS, b"AXCDEFGHIJKL", routes).serving(tmp_path) as client:
        status, whole = await client.chat(n=3, max_tokens=7)
    assert status == 200
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["AXCDEFG"] * 3
    assert whole["usage"]["route"]["tokens"] == {"small": 15, "large": 6}
