"""The control socket: trouterctl's calls, answered by the supervisor."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from trouterd.calls import reply_to
from trouterd.control import Call, ControlError, pack_frame, read_frame

_CREDENTIALS = struct.Struct("3i")
log = logging.getLogger("trouterd.supervisor")

Answer = Callable[[str, dict[str, Any], str], Awaitable[Any]]


class ControlServer:
    """Serves a listening socket; every connection may have several calls, one after the other."""

    def __init__(self, answer: Answer) -> None:
        """
        Args:
            answer: coroutine function of verb, args and who asks; its result or exception becomes the reply.
        """
        self._answer = answer
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Accept from now on."""
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def aclose(self) -> None:
        """Stop accepting and hang up; replies that were written are still sent."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = _who(writer)
        try:
            await self._answer_calls(reader, writer, who)
        except (ControlError, ConnectionError) as error:
            log.warning("control socket, %s: %s", who, error)
        finally:
            writer.close()

    async def _answer_calls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, who: str) -> None:
        while (frame := await read_frame(reader)) is not None:
            if not isinstance(frame, Call):
                raise ControlError(f"expected Call, got {type(frame).__name__}")
            outcome = asyncio.ensure_future(self._answer(frame.verb, frame.args, who))
            await asyncio.wait({outcome})
            writer.write(pack_frame(reply_to(frame, outcome)))
            await writer.drain()


def _who(writer: asyncio.StreamWriter) -> str:
    """The client's user and process, for the audit line."""
    peer = writer.get_extra_info("socket")
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return f"uid {uid} pid {pid}"
