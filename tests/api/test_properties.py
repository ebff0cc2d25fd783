"""Text that does not depend on how it arrives: streamed, whole, and cut out of the full decoding by a plain rule."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from ipc.messages import TokenUpdate, pack_ids
from models.tokenizer import Tokenizer
from trouterd.api.answer import Answer, TextOptions
from trouterd.api.stops import StopMatcher, StopStrings

ALPHABET = "abé😀"
texts = st.text(ALPHABET, max_size=24)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def expected_cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Text before the match that ends first (the longest of those), and the match; ('all of it', '') without one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(texts, stop_lists, st.lists(st.integers(1, 4), max_size=24))
@example("aab", ["ab"], [1, 1, 1])
@example("abab", ["abb", "bab"], [1, 1, 1, 1])
def test_stop_matcher_is_the_plain_rule(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, released, rest = StopMatcher(StopStrings(stops)), "", text
    for cut in [*cuts, len(text)]:
        piece, rest = rest[:cut], rest[cut:]
        released += matcher.push(piece)
        seen = text[: len(text) - len(rest)]
        held = expected_cut(seen, stops)[0][len(released) :]
        assert matcher.matched or not held or any(stop.startswith(held) for stop in stops), "held back without a reason"
        if matcher.matched:
            break
    else:
        released += matcher.flush()
    assert (released, matcher.matched) == expected_cut(text, stops)


@given(
    st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("ab😀é".encode()))), max_size=40),
    st.lists(st.integers(1, 6), max_size=40),
    st.lists(st.text("ab😀é\ufffd", min_size=1, max_size=4), max_size=3),
)
def test_streamed_equals_whole_equals_full_decode(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    def run(cuts: Sequence[int]) -> tuple[str, int, str]:
        answer = Answer(TextOptions(tokenizer, ("m",), StopStrings(stops) if stops else None))
        pieces, start = [], 0
        for size in cuts:
            part = ids[start : start + size]
            finish = "length" if start + len(part) >= len(ids) else ""
            pieces.append(answer.push(TokenUpdate(1, start, pack_ids(part), bytes(len(part)), finish)).text)
            start += len(part)
            if finish:
                break
        return "".join(pieces), answer.completion_tokens, answer.finish

    streamed = run([*sizes, *[1] * (len(ids) + 1)])
    whole = run([len(ids)])
    text, matched = expected_cut(bytes(ids).decode("utf-8", "replace"), stops)
    assert streamed == whole
    assert streamed[0] == text
    assert streamed[2] == ("stop" if matched else "length")
    if not matched:
        assert streamed[1] == len(ids)
