"""An OpenAI endpoint whose tokens come when a test says so, with the habits of different servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

NEVER = 1 << 30


@dataclass
class Stream:
    """One answer that is under way."""

    body: dict[str, Any]
    response: web.StreamResponse
    written: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeServer:
    """Habits, and what has been asked."""

    takes_ids: bool = True
    takes_extras: bool = True
    has_completions: bool = True
    returns_ids: bool = True
    usage: str = "continuous"
    """Or `final`, or `none`."""
    per_event: int = 1
    """Tokens."""
    length: int = NEVER
    """Tokens after which an answer ends of its own accord."""
    crlf: bool = False
    alone: bool = True
    """Whether it runs by itself; False: `step` makes tokens."""
    fault: str = ""
    """`status`, `event`, `close` or `silence`: how requests fail after `sound` of them."""
    sound: int = 0
    events: int = 0
    """That carried tokens."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def served(self, folder: Path, *, tcp: bool = False) -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        path = str(folder / "fake.sock")
        site: web.BaseSite = web.TCPSite(runner, "127.0.0.1", 0) if tcp else web.UnixSite(runner, path)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}" if tcp else f"unix:{path}"
        finally:
            for stream in self.streams:
                stream.done.set()
            await runner.cleanup()

    async def step(self) -> None:
        """An event for every stream."""
        for stream in list(self.streams):
            await self._event(stream)

    async def until(self, count: int) -> None:
        """Wait until so many streams are under way."""
        while len(self.streams) < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = request.path.startswith("/v1/chat")
        if refusal := self._refusal(body, chat):
            status, message = refusal
            return web.json_response({"error": {"message": message}}, status=status)
        self.bodies.append(body | {"chat": chat})
        broken = self.fault if len(self.bodies) > self.sound else ""
        if broken == "status":
            return web.json_response({"error": {"message": "the model is gone"}}, status=503)
        if broken == "silence":
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        stream = Stream(body | {"chat": chat}, response)
        with contextlib.suppress(ConnectionResetError):  # the client may have what it wants
            await response.prepare(request)
            if chat:
                await self._send(stream, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await (self._break_off(request, stream) if broken else self._write_all(stream))
        return response

    async def _break_off(self, request: web.Request, stream: Stream) -> None:
        await self._event(stream)
        if self.fault == "event":
            await self._send(stream, {"error": {"message": "the model failed"}})
        elif request.transport is not None:
            request.transport.abort()

    async def _write_all(self, stream: Stream) -> None:
        self.streams.append(stream)
        self.arrived.set()
        by_itself = self.alone or stream.body["max_tokens"] <= 8  # as a trial's
        try:
            while by_itself and not stream.done.is_set():
                await self._event(stream)
                await asyncio.sleep(0)
            await stream.done.wait()
            await stream.response.write_eof()
        finally:
            if stream in self.streams:
                self.streams.remove(stream)

    def _refusal(self, body: dict[str, Any], chat: bool) -> tuple[int, str] | None:
        if body["model"] != "fake":
            return 404, f"no model {body['model']}"
        if not chat and not self.has_completions:
            return 404, "no such path"
        if not self.takes_ids and isinstance(body.get("prompt"), list):
            return 422, "prompt must be a string"
        if not self.takes_extras and "stream_options" in body:
            return 400, "stream_options is unknown"
        return None

    async def _event(self, stream: Stream) -> None:
        most = min(stream.body["max_tokens"], self.length)
        count = min(self.per_event, most - stream.written)
        self.events += 1
        first, stream.written = stream.written, stream.written + count
        text = "".join(f" t{number}" for number in range(first, stream.written))
        choice: dict[str, Any] = (
            {"index": 0, "delta": {"content": text}} if stream.body["chat"] else {"index": 0, "text": text}
        )
        if stream.body.get("return_token_ids") and self.returns_ids:
            choice["token_ids"] = list(range(first, stream.written))
        wanted = (stream.body.get("stream_options") or {}).get("continuous_usage_stats")
        usage = self._usage(stream) if wanted and self.usage == "continuous" else None
        await self._send(stream, {"choices": [choice], "usage": usage})
        if stream.written == most:
            if stream.body.get("stream_options") and self.usage != "none":
                await self._send(stream, {"choices": [], "usage": self._usage(stream)})
            await self._write(stream, "[DONE]")
            self.streams.remove(stream)
            stream.done.set()

    def _usage(self, stream: Stream) -> dict[str, int]:
        prompt = stream.body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else 2 * len(str(prompt or stream.body["messages"]).split())
        return {"prompt_tokens": count, "completion_tokens": stream.written}

    async def _send(self, stream: Stream, event: dict[str, Any]) -> None:
        await self._write(stream, json.dumps({"id": "x", **event}))

    async def _write(self, stream: Stream, data: str) -> None:
        end = "\r\n\r\n" if self.crlf else "\n\n"
        await stream.response.write(f"data: {data}{end}".encode())
