"""One HTTP/1.1 response taken apart: status, headers, and its body without the framing."""

from __future__ import annotations

from enum import Enum, auto
from http.client import HTTPException, parse_headers
from io import BytesIO

_LINE = b"\r\n"
_MOST_HEAD = 1 << 16
"""Bytes of status line and headers."""


class BadResponseError(Exception):
    """Bytes that are no HTTP response, or a response that ended too early."""


class _Framing(Enum):
    HEAD = auto()
    """Status line and headers are not complete."""
    CHUNKED = auto()
    LENGTH = auto()
    CLOSE = auto()
    """The body ends with the connection."""
    ENDED = auto()


class ResponseReader:
    """Feed it what arrives, in pieces of any size."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the headers are there."""
        self.reusable = False
        """Whether the connection takes another request after this one."""
        self._framing = _Framing.HEAD
        self._rest = b""
        """What has come of a head, or of the line before a chunk."""
        self._left = 0
        """Bytes of the body, or of a chunk and its line end, that have not come."""
        self._trailing = False
        """The last chunk has come; lines follow up to an empty one."""

    @property
    def ended(self) -> bool:
        """Whether all of it has come."""
        return self._framing is _Framing.ENDED

    def feed(self, data: bytes) -> bytes:
        """The part of the body in this piece.

        Raises:
            BadResponseError: this is no HTTP/1.1, or more than one response.
        """
        if self._framing is _Framing.HEAD:
            data = self._head(self._rest + data)
        if self._framing is _Framing.CHUNKED:
            return self._chunks(self._rest + data)
        if self._framing is _Framing.LENGTH:
            self._left -= len(data)
            if self._left < 0:
                raise BadResponseError("more bytes than its Content-Length")
            if self._left == 0:
                self._framing = _Framing.ENDED
        return data

    def close(self) -> None:
        """The connection has ended.

        Raises:
            BadResponseError: before the response did.
        """
        self.reusable = False
        if self._framing is _Framing.CLOSE:
            self._framing = _Framing.ENDED
        elif self._framing is not _Framing.ENDED:
            unheard = self._framing is _Framing.HEAD and not self._rest
            raise BadResponseError(
                f"the connection was closed {'without an' if unheard else 'in the middle of the'} answer"
            )

    def _head(self, data: bytes) -> bytes:
        """Read status line and headers if they are complete; returns what follows them."""
        while True:
            head, found, after = data.partition(_LINE + _LINE)
            if not found:
                if len(data) > _MOST_HEAD:
                    raise BadResponseError(f"headers of more than {_MOST_HEAD} bytes")
                self._rest = data
                return b""
            line, _, lines = head.partition(_LINE)
            status = _status(line)
            if status >= 200:
                break
            data = after  # 1xx: the response is still to come
        self.status, self._rest = status, b""
        self._frame(lines, b"HTTP/1.0" in line)
        return after

    def _frame(self, lines: bytes, old: bool) -> None:
        try:
            headers = parse_headers(BytesIO(lines + _LINE + _LINE))
            length = headers.get("Content-Length")
            self._left = int(length) if length is not None else 0
        except (HTTPException, ValueError) as error:
            raise BadResponseError(f"unreadable headers: {error}") from error
        self.reusable = headers.get("Connection", "close" if old else "").lower() != "close"
        if headers.get("Transfer-Encoding", "").lower().endswith("chunked"):
            self._framing, self._left = _Framing.CHUNKED, 0
        elif length is not None or self.status in (204, 304):
            self._framing = _Framing.LENGTH if self._left else _Framing.ENDED
        else:
            self._framing = _Framing.CLOSE

    def _chunks(self, data: bytes) -> bytes:
        if not (self._left or self._trailing) and data.endswith(_LINE):
            # Nearly always: one whole chunk.
            end = data.find(_LINE)
            begin = end + len(_LINE)
            size = _size(data[:end])
            if size and len(data) == begin + size + len(_LINE):
                self._rest = b""
                return data[begin:-2]
        pieces = []
        at = 0
        while at < len(data):
            if self._left:
                have = min(len(data) - at, self._left)
                body = min(have, max(0, self._left - len(_LINE)))
                pieces.append(data[at : at + body])
                at += have
                self._left -= have
                continue
            end = data.find(_LINE, at)
            if end < 0:
                break
            line = data[at:end]
            at = end + len(_LINE)
            if self._trailing:
                if not line:
                    self._framing = _Framing.ENDED
                    break
            else:
                size = _size(line)
                self._trailing = size == 0
                self._left = size + len(_LINE) if size else 0
        self._rest = data[at:]
        if self.ended and self._rest:
            raise BadResponseError("bytes after its last chunk")
        return b"".join(pieces)


def _status(line: bytes) -> int:
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or not code.isdigit():
        raise BadResponseError(f"no HTTP/1.1: {line[:80]!r}")
    return int(code)


def _size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadResponseError(f"no size of a chunk: {line[:80]!r}") from None
