"""The endpoint on a unix socket in front of scripted workers: no rings, no supervisor, no models."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from ipc.messages import Abort, Message, Submit, Tokens, TokenUpdate, pack_ids
from models.tokenizer import Tokenizer
from trouterd.api.app import build_app
from trouterd.api.catalog import Catalog
from trouterd.api.engine import EngineClient
from trouterd.api.schema import FieldCensus
from trouterd.api.scores import Scores
from trouterd.api.services import Services
from trouterd.config import Config, Model, Route, Server
from trouterd.control import PeerState
from trouterd.metrics import Family

EOS = 257


@dataclass
class Script:
    """What a scripted worker does with every request."""

    ids: Sequence[int]
    cycle: bool = False
    per_update: int = 1
    """Ids in one update."""
    writer: Callable[[int], int] = lambda _index: 0
    """Output index -> route index of the writer."""
    fail_at: int | None = None
    fail_with: Sequence[int] = ()
    """Ids that come in the update of the failure."""
    error: str = "the model failed while computing this answer"
    status: int = 500
    gate_at: int | None = None
    """Output index before which the worker waits for `gate`."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    eos_ids: frozenset[int] = frozenset({EOS})
    handoffs: int = 0
    pending_us: int = 0
    burst: bool = False
    """Send everything without giving way to other tasks."""


class ScriptedWorkers:
    """Plays the script for each Submit and remembers what the api sent."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.engine: EngineClient | None = None
        self.submits: list[Submit] = []
        self.entries: list[str] = []
        self.aborts: list[int] = []
        self.full = False
        """Refuse every message, as a full ring does."""
        self.played: dict[int, int] = {}
        """rid -> ids sent."""
        self.aborted = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def send(self, worker: str, message: Message) -> bool:
        """Stands in for a ring."""
        if self.full:
            return False
        if isinstance(message, Submit):
            self.submits.append(message)
            self.entries.append(worker)
            self._tasks[message.rid] = asyncio.create_task(self._play(worker, message))
        else:
            assert isinstance(message, Abort)
            self.aborts.append(message.rid)
            self.aborted.set()
            self._tasks[message.rid].cancel()
        return True

    async def aclose(self) -> None:
        """End what still plays."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _play(self, worker: str, submit: Submit) -> None:
        script, sampling, index = self.script, submit.sampling, 0
        while True:
            if script.gate_at is not None and index >= script.gate_at:
                await script.gate.wait()
            if script.fail_at is not None and index >= script.fail_at:
                last, writers = pack_ids(list(script.fail_with)), bytes(len(script.fail_with))
                failure = TokenUpdate(
                    submit.rid, index, last, writers, "error", error=script.error, status=script.status
                )
                self.deliver(worker, failure)
                return
            ids: list[int] = []
            finish, trim = "", 0
            while len(ids) < script.per_update and not finish:
                position = index + len(ids)
                ended = not script.cycle and position >= len(script.ids)
                token = EOS if ended else script.ids[position % len(script.ids)]
                ids.append(token)
                if token in sampling.stop_token_ids or (token in script.eos_ids and not sampling.ignore_eos):
                    finish, trim = "stop", 1
                elif position + 1 == sampling.max_tokens:
                    finish = "length"
            writers = bytes(script.writer(index + offset) for offset in range(len(ids)))
            self.played[submit.rid] = index + len(ids)
            self.deliver(
                worker,
                TokenUpdate(
                    submit.rid, index, pack_ids(ids), writers, finish, trim, script.handoffs, "", script.pending_us
                ),
            )
            index += len(ids)
            if finish:
                return
            if not script.burst:
                await asyncio.sleep(0)

    def deliver(self, worker: str, *updates: TokenUpdate) -> None:
        """One record from a worker."""
        assert self.engine is not None
        self.engine.deliver(worker, Tokens(updates))


@dataclass
class Stream:
    """A parsed event stream."""

    status: int
    headers: Any
    raw: str
    events: list[dict[str, Any]]
    comments: int
    done: bool

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Events that are no error."""
        return [event for event in self.events if "error" not in event]

    def text(self, index: int = 0) -> str:
        """Concatenated content of one choice."""
        parts = []
        for event in self.chunks:
            for choice in event["choices"]:
                if choice["index"] == index:
                    parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
        return "".join(parts)

    def finishes(self, index: int = 0) -> list[str]:
        """Non-null finish reasons of one choice."""
        choices = [choice for event in self.chunks for choice in event["choices"] if choice["index"] == index]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def parse_stream(status: int, headers: Any, raw: str) -> Stream:
    """Split an SSE body into events."""
    events, comments, done = [], 0, False
    for block in raw.split("\n\n"):
        if not block:
            continue
        if block.startswith(":"):
            comments += 1
        elif block == "data: [DONE]":
            assert not done, "two [DONE]"
            done = True
        else:
            assert block.startswith("data: "), block
            assert not done, "an event after [DONE]"
            events.append(json.loads(block.removeprefix("data: ")))
    return Stream(status, headers, raw, events, comments, done)


@dataclass
class Client:
    """A client of a served application, and what serves it."""

    session: aiohttp.ClientSession
    services: Services
    socket: Path

    @property
    def engine(self) -> EngineClient:
        """The application's."""
        return self.services.engine

    @property
    def catalog(self) -> Catalog:
        """The application's."""
        return self.services.catalog

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """POST a body (bytes as they are, anything else as JSON); status and JSON answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(f"http://test{path}", data=data, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """GET; status and JSON answer."""
        async with self.session.get(f"http://test{path}", headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """POST with stream=true and read to the end."""
        async with self.session.post(f"http://test{path}", json=body | {"stream": True}) as response:
            return parse_stream(response.status, response.headers, (await response.read()).decode())

    async def chat(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST chat with one user message 'x'."""
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def chat_stream(self, **fields: Any) -> Stream:
        """The same, streamed."""
        return await self.stream("/v1/chat/completions", chat_body(**fields))

    def report(self, name: str, state: str, epoch: int = 1) -> None:
        """A worker's state, as the supervisor tells it."""
        self.engine.on_peer_state(PeerState(name=name, state=state, epoch=epoch, pid=1))


@dataclass
class Endpoint(Client):
    """A client of an application in front of scripted workers."""

    workers: ScriptedWorkers


def chat_body(**fields: Any) -> dict[str, Any]:
    """A chat request with one user message 'x'."""
    return {"model": "demo", "messages": [{"role": "user", "content": "x"}]} | fields


def config(**server: Any) -> Config:
    """Two models and one route."""
    return Config(
        server=Server(**server),
        models={"small": Model(path="/models/small"), "large": Model(path="/models/large")},
        routes={"demo": Route(models=["small", "large"], algorithm="entropy", params={"threshold": 0.3})},
    )


async def _check_params(route: str, params: dict[str, float]) -> dict[str, float]:
    for name, value in params.items():
        if name != "threshold" or not 0 <= value <= 10:
            raise ValueError(f"{route}: {name}={value} is no parameter, or out of range")
    return params


async def _no_metrics() -> list[Family]:
    return []


@contextlib.asynccontextmanager
async def listening(
    folder: Path, services: Services, settings: Config
) -> AsyncIterator[tuple[aiohttp.ClientSession, Path]]:
    """Serve on a unix socket in `folder`; a client session for it, and its path."""
    app = build_app(services, max_body_bytes=settings.server.max_body_bytes)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    socket = folder / "api.sock"
    await web.UnixSite(runner, str(socket), backlog=1024).start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(socket), limit=0)) as session:
            yield session, socket
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serve(
    folder: Path,
    tokenizer: Tokenizer,
    script: Script,
    *,
    settings: Config | None = None,
    contexts: dict[str, int] | None = None,
    api_keys: tuple[bytes, ...] = (),
    worker_metrics: Callable[[], Any] = _no_metrics,
    up: bool = True,
) -> AsyncIterator[Endpoint]:
    """The endpoint on a unix socket in `folder`."""
    settings = settings or config()
    workers = ScriptedWorkers(script)
    engine = EngineClient(settings, workers.send)
    workers.engine = engine
    catalog = Catalog(
        settings, dict.fromkeys(settings.models, tokenizer), contexts or dict.fromkeys(settings.models, 4096)
    )
    services = Services(
        engine=engine,
        catalog=catalog,
        check_params=_check_params,
        scores=Scores(settings),
        worker_metrics=worker_metrics,
        census=FieldCensus(engine.metrics),
        api_keys=api_keys,
    )
    try:
        async with listening(folder, services, settings) as (session, socket):
            endpoint = Endpoint(session, services, socket, workers)
            if up:
                for name in settings.models:
                    endpoint.report(name, "up")
            yield endpoint
    finally:
        await workers.aclose()
    assert not engine.report(), "requests were left behind"
