"""What a client reads from a stream of events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.answer import Answer, AnswerError, Log


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": words, "finish_reason": None}], **more}


def usage(tokens: int) -> dict[str, Any]:
    return {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def stream(*events: dict[str, Any], end: str = "\n\n", spaced: bool = False) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    lines = [f"data: {json.dumps(event, separators=separators)}" for event in events]
    return "".join(line + end for line in [": keep-alive", *lines, "data: [DONE]"]).encode()


@given(
    st.lists(st.text(min_size=1, max_size=8) | st.just('data: {"choices":[]} \n\n'), min_size=1, max_size=8),
    st.lists(st.integers(0, 4000), max_size=10),
    st.sampled_from(["\n\n", "\r\n\r\n"]),
    st.booleans(),
)
def test_tokens_and_text_in_any_pieces(words: list[str], cuts: list[int], end: str, spaced: bool) -> None:
    body = stream(*map(text, words), usage(len(words)), end=end, spaced=spaced)
    answer, begin = Answer(log := Log(open=True), keep=True), 0
    for now, cut in enumerate([*sorted({cut % len(body) for cut in cuts}), len(body)], 1):
        answer.receive(body[begin:cut], float(now))
        begin = cut
    answer.end()
    assert (answer.tokens, answer.events) == (len(words), len(words))
    assert answer.text() == "".join(words)
    assert len(log.first) == len(log.whole) == 1
    assert len(log.gaps) < len(words)
    assert sum(log.gaps) <= len(cuts)


def test_a_role_is_no_token_and_a_usage_no_arrival() -> None:
    answer = Answer(log := Log(open=True), keep=True)
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"reasoning_content": "b"}, {"content": "c"}]
    for now, delta in enumerate(deltas):
        answer.receive(stream({"choices": [{"index": 0, "delta": delta}]}).partition(b"data: [DONE]")[0], float(now))
    answer.receive(stream(usage(3)), 9.0)
    answer.end()
    assert answer.first == 1.0
    assert log.gaps == [1.0, 1.0]
    assert (answer.tokens, answer.events, answer.text()) == (3, 3, "abc")
    assert not answer.counted_early


def test_tokens_without_text_count_where_the_server_counts_them() -> None:
    answer = Answer(Log(), keep=True)
    ids = {"choices": [{"index": 0, "text": "", "token_ids": [7, 8]}], "usage": {"completion_tokens": 2}}
    answer.receive(stream(ids), 1.0)
    answer.end()
    assert answer.first == 1.0
    assert answer.counted_early
    assert answer.token_ids() == [7, 8]
    assert answer.tokens == 2


def test_without_a_usage_events_are_tokens() -> None:
    answer = Answer(Log())
    answer.receive(stream(text("a"), text("b")), 1.0)
    answer.end()
    assert answer.usage() is None
    assert answer.tokens == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (stream(text("a"), {"error": {"message": "the model failed"}}), "the model failed"),
        (stream({"error": "overloaded"}), "overloaded"),
        (b'{"choices": [{"text": "whole"}]}', "no tokens in the stream.*whole"),
        (b"data: [DONE]\n\n", "no tokens"),
        (b'data: {"broken\n\n', "no JSON"),
    ],
)
def test_answers_that_have_failed(body: bytes, message: str) -> None:
    answer = Answer(Log())
    answer.receive(body, 1.0)
    with pytest.raises(AnswerError, match=message):
        answer.end()


def test_a_closed_log_sees_nothing() -> None:
    answer = Answer(log := Log())
    answer.receive(stream(text("a")), 1.0)
    answer.receive(stream(text("a")), 2.0)
    answer.end()
    assert log == Log()
