"""A connection to an OpenAI endpoint, over TCP or a unix socket, whose answers reach their receiver the moment they arrive.

A client library wakes a task for every piece of an answer. With 64 streams that takes nearly twice the CPU, on a small host
from the system under test, and pieces that come close together are seen as one (docs/throughput.md has figures). Hence a
protocol of our own.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from bench.http_response import BadResponseError, ResponseReader

CONNECT_TIMEOUT = 10.0
SILENCE = 300.0
"""Seconds without a byte after which an answer is given up; prompts of many requests may have to be read first."""
_QUOTED = 500
"""Characters of an error's body."""

Receive = Callable[[bytes, float], None]
"""Takes a piece of a body and when it came, seconds of time.perf_counter."""


class EndpointError(RuntimeError):
    """A server cannot be reached, refuses a request, or breaks off an answer; the message names it and says what it said."""

    def __init__(self, url: str, message: str, status: int = 0) -> None:
        super().__init__(f"{url}: {message}")
        self.status = status
        """Of HTTP; 0 where there was none."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    url: str
    """As given."""
    socket: str = ""
    """Path of a unix socket; '': TCP."""
    host: str = ""
    port: int = 0
    prefix: str = ""
    """Of all paths."""

    @classmethod
    def of(cls, url: str) -> Address:
        """Take a URL apart: `unix:/path/of.sock`, or `http://host:port`, whose path may end with /v1.

        Raises:
            ValueError: it is neither.
        """
        if url.startswith("unix:"):
            path = url.removeprefix("unix:")
            if not path:
                raise ValueError(f"{url}: expected unix:/path/of.sock")
            return cls(url, socket="/" + path.lstrip("/") if path.startswith("//") else path)
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url}: expected http://host:port or unix:/path/of.sock (there is no TLS)")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url, host=parts.hostname, port=parts.port or 80, prefix=prefix)


@dataclass(frozen=True, slots=True)
class Response:
    """A whole one."""

    status: int
    body: bytes
    """Empty where a receiver took it."""


class _Wire(asyncio.Protocol):
    """One open connection; passes bodies on as they come."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        """None: closed."""
        self.heard = 0.0
        """When the latest byte came, or the request left; seconds of time.perf_counter."""
        self.silent = True
        """Whether no byte has come for the present request."""
        self._reader = ResponseReader()
        self._receive: Receive | None = None
        self._collected: list[bytes] = []
        self._ended: asyncio.Future[None] | None = None

    def send(self, request: bytes, receive: Receive | None) -> asyncio.Future[None]:
        """Returns what is done when the answer has ended, with BadResponseError if it has ended badly."""
        self._reader, self._receive, self._collected = ResponseReader(), receive, []
        self.heard, self.silent = time.perf_counter(), True
        self._ended = asyncio.get_running_loop().create_future()
        if self.transport is None:
            self._ended.set_exception(BadResponseError("the connection was closed"))
        else:
            self.transport.write(request)
        return self._ended

    def response(self) -> Response:
        """After its end."""
        if not self._reader.reusable:
            self.close()
        return Response(self._reader.status, b"".join(self._collected))

    def close(self) -> None:
        """Hang up at once; what has been sent goes unanswered."""
        if self._ended is not None:
            self._ended.cancel()
        if self.transport is not None:
            self.transport.abort()
            self.transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        now = self.heard = time.perf_counter()
        self.silent = False
        ended = self._ended
        if ended is None or ended.done():
            self.close()  # nobody has asked
            return
        try:
            piece = self._reader.feed(data)
        except BadResponseError as error:
            ended.set_exception(error)
            return
        if piece:
            if self._receive is not None and self._reader.status == 200:
                self._receive(piece, now)
            else:
                self._collected.append(piece)
        if self._reader.ended:
            ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop. The end of the request that is under way: a fault, unless its answer has no other end."""
        self.transport = None
        ended = self._ended
        if ended is None or ended.done():
            return
        try:
            self._reader.close()
        except BadResponseError as error:
            ended.set_exception(BadResponseError(str(exc)) if exc else error)
        else:
            ended.set_result(None)


class Connection:
    """Sends requests one after another; opens itself when it has to. With OPENAI_API_KEY set, requests carry that key.

    Args:
        address: of the server.
        silence: seconds without a byte after which a request is given up.
    """

    def __init__(self, address: Address, silence: float = SILENCE) -> None:
        self._address = address
        self._silence = silence
        self._wire: _Wire | None = None

    async def ask(self, method: str, path: str, body: Any = None, receive: Receive | None = None) -> Response:
        """Send a request and wait for the end of its answer.

        Args:
            method: of HTTP.
            path: of the endpoint.
            body: sent as JSON.
            receive: given the body of an answer with status 200 as it comes.

        Raises:
            EndpointError: the server cannot be reached, is silent or breaks off. An answer of any status is an answer.
        """
        request = self._request(method, path, body)
        while True:
            fresh = self._wire is None or self._wire.transport is None
            wire = await self._opened()
            try:
                await self._until_ended(wire, wire.send(request, receive))
                return wire.response()
            except BadResponseError as error:
                wire.close()
                # A server may close an idle connection at the moment at which a request leaves on it.
                if fresh or not wire.silent:
                    raise self._error(f"{method} {path}: {error}") from error
            except BaseException:  # cancelled, or silent for too long: the answer that may still come is nobody's
                wire.close()
                raise

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """The content of an answer that must be JSON with status 200.

        Raises:
            EndpointError: it is not, or none came.
        """
        response = await self.ask(method, path, body)
        if response.status != 200:
            raise self.refusal(method, path, response)
        try:
            return json.loads(response.body)
        except ValueError as error:
            raise self._error(f"{method} {path}: no JSON: {response.body[:_QUOTED]!r}") from error

    def refusal(self, method: str, path: str, response: Response) -> EndpointError:
        """What to say of an answer with another status than 200."""
        said = f"HTTP {response.status}: {_error_text(response.body)}"
        return self._error(f"{method} {path}: {said}", response.status)

    def fault(self, method: str, path: str, what: str) -> EndpointError:
        """What to say of an answer that is none although its status is 200."""
        return self._error(f"{method} {path}: {what}", 200)

    def close(self) -> None:
        """Hang up; a request that is under way ends on the server."""
        if self._wire is not None:
            self._wire.close()

    async def _opened(self) -> _Wire:
        if self._wire is not None and self._wire.transport is not None:
            return self._wire
        loop, address = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if address.socket:
                    _, self._wire = await loop.create_unix_connection(_Wire, address.socket)
                else:
                    _, self._wire = await loop.create_connection(_Wire, address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise self._error(f"cannot connect: {error or 'no answer'}") from error
        return self._wire

    async def _until_ended(self, wire: _Wire, ended: asyncio.Future[None]) -> None:
        while not ended.done():
            left = wire.heard + self._silence - time.perf_counter()
            if left <= 0:
                raise self._error(f"no byte of an answer for {self._silence:g} s")
            await asyncio.wait({ended}, timeout=left)
        ended.result()

    def _request(self, method: str, path: str, body: Any) -> bytes:
        address = self._address
        payload = b"" if body is None else json.dumps(body).encode()
        host = f"{address.host}:{address.port}" if address.host else "localhost"
        lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {host}", "Accept: */*"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"] if body is not None else []
        lines += [f"Authorization: Bearer {key}"] if (key := os.environ.get("OPENAI_API_KEY")) else []
        return "\r\n".join([*lines, "", ""]).encode() + payload

    def _error(self, message: str, status: int = 0) -> EndpointError:
        return EndpointError(self._address.url, message, status)


def _error_text(body: bytes) -> str:
    """What the body of an error says: the message of OpenAI's error object, or else its beginning."""
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    error = content.get("error", content) if isinstance(content, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message) if message else body[:_QUOTED].decode(errors="replace") or "no content"
