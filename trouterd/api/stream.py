"""Server-sent events over one HTTP response."""

from __future__ import annotations

import msgspec
from aiohttp import web

from trouterd.api.errors import RequestError

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode_into = msgspec.json.Encoder().encode_into


def frame(event: msgspec.Struct, buffer: bytearray) -> None:
    """Append one `data:` frame."""
    buffer += b"data: "
    _encode_into(event, buffer, -1)
    buffer += b"\n\n"


class EventStream:
    """The response of a streaming request; headers go out with the first write, so that early errors keep their status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        self.started = False
        request[EVENTS] = self

    async def write(self, data: bytes | bytearray) -> None:
        """Send complete frames.

        Raises:
            ConnectionError: the client is gone.
        """
        if not self.started:
            self.started = True
            await self._response.prepare(self._request)
        await self._response.write(data)

    async def finish(self, data: bytes | bytearray = b"") -> web.StreamResponse:
        """Send last frames and the end of the stream."""
        await self.write(bytes(data) + DONE)
        await self._response.write_eof()
        return self._response

    async def fail(self, error: RequestError) -> web.StreamResponse:
        """End with an error frame and close the connection."""
        self._response.force_close()
        return await self.finish(b"data: " + error.body() + b"\n\n")


EVENTS = web.RequestKey("events", EventStream)
"""Through which the error handler finds a stream that has begun."""
