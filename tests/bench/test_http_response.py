"""Responses taken apart, whatever pieces they come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.http_response import BadResponseError, ResponseReader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(parts: list[bytes], trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in parts if part)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


def fed(data: bytes, cuts: list[int]) -> tuple[ResponseReader, bytes]:
    reader, begin, body = ResponseReader(), 0, b""
    for cut in [*sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]:
        if cut > begin:
            body += reader.feed(data[begin:cut])
        begin = cut
    return reader, body


@given(
    st.lists(st.binary(max_size=40)),
    st.lists(st.integers(0, 1000), max_size=12),
    st.sampled_from(["chunked", "trailer", "length", "close", "continue"]),
)
def test_any_framing_in_any_pieces(parts: list[bytes], cuts: list[int], framing: str) -> None:
    body = b"".join(parts)
    data = {
        "chunked": chunked(parts),
        "trailer": chunked(parts, b"X-Sum: 1\r\n"),
        "length": HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
        "close": HEAD + b"\r\n" + body,
        "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(parts),
    }[framing]
    reader, found = fed(data, cuts)
    assert found == body
    assert reader.status == 200
    assert reader.ended is (framing != "close")
    reader.close()
    assert reader.ended


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1), st.lists(st.integers(0, 1000)), st.integers(1, 1000))
def test_an_early_end_is_seen(parts: list[bytes], cuts: list[int], missing: int) -> None:
    data = chunked(parts)
    reader, found = fed(data[: -(1 + missing % (len(data) - 1))], cuts)
    assert b"".join(parts).startswith(found)
    assert not reader.ended
    with pytest.raises(BadResponseError, match="closed"):
        reader.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP/1.1"),
        (HEAD + b"Content-Length: many\r\n\r\n", "unreadable headers"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "size of a chunk"),
        (HEAD + b"Content-Length: 1\r\n\r\nab", "Content-Length"),
        (chunked([b"a"]) + b"HTTP/1.1", "after its last chunk"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000, "headers of more than"),
    ],
)
def test_what_is_no_response(data: bytes, message: str) -> None:
    with pytest.raises(BadResponseError, match=message):
        ResponseReader().feed(data)


@pytest.mark.parametrize(
    ("lines", "reusable"), [(b"", True), (b"Connection: close\r\n", False), (b"Connection: Keep-Alive\r\n", True)]
)
def test_connections_that_take_another_request(lines: bytes, reusable: bool) -> None:
    reader = ResponseReader()
    reader.feed(HEAD + lines + b"Content-Length: 0\r\n\r\n")
    assert reader.ended
    assert reader.reusable is reusable
    old = ResponseReader()
    old.feed(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert not old.reusable
