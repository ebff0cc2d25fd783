"""The whole api role: control link, real rings, listening sockets, and a scripted worker at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.messages import Message, Submit, Tokens, TokenUpdate, pack_ids
from ipc.segment import SharedSegment
from tests.api.harness import EOS, chat_body
from tests.models.tiny import byte_tokenizer
from trouterd import metrics
from trouterd.api import main
from trouterd.child import Control
from trouterd.config import Config, Model, Route, Server
from trouterd.control import Boot, Call, Fatal, Frame, Link, PeerState, Ready, Reply, pack_frame, read_frame
from trouterd.links import Links

CHAT = "http://test/v1/chat/completions"


@dataclass
class Supervisor:
    """The other end of the control link."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    role: asyncio.Task[int]
    control: Control
    session: aiohttp.ClientSession
    answer: str = "hi"
    """What the worker says."""

    def send(self, frame: Frame) -> None:
        """One frame to the api."""
        self.writer.write(pack_frame(frame))

    async def receive(self, kind: type[Any]) -> Any:
        """The next frame, which must be of this kind."""
        frame = await read_frame(self.reader)
        assert isinstance(frame, kind), frame
        return frame

    async def call(self, verb: str, **args: Any) -> Reply:
        """A verb and its reply."""
        self.send(Call(7, verb, args))
        reply: Reply = await self.receive(Reply)
        assert reply.id == 7
        return reply


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def _ring(ring_id: int, stack: contextlib.ExitStack) -> tuple[int, int, int]:
    segment = SharedSegment.create(RingSpec(ring_id=ring_id, capacity=1 << 16, max_record=1 << 14))
    stack.callback(segment.close)
    events = create_event(), create_event()
    for event in events:
        stack.callback(os.close, event)
    return segment.fileno(), *events


@contextlib.asynccontextmanager
async def running(folder: Path, config: Config) -> AsyncIterator[Supervisor]:
    """The api role in this process, with one worker 'small' that answers every request at once."""
    with contextlib.ExitStack() as stack:
        forth, back = _ring(1, stack), _ring(2, stack)
        listeners = [_listener(folder / "api.sock"), socket.create_server(("127.0.0.1", 0))]
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        boot = Boot(
            role="api",
            epoch=3,
            config=config,
            inbound=[Link("small", *back)],
            outbound=[Link("small", *forth)],
            listen_fds=[listener.detach() for listener in listeners],
        )
        writer.write(pack_frame(boot))
        control = await Control.open(theirs)
        role = asyncio.create_task(main.run(control))
        connector = aiohttp.UnixConnector(path=str(folder / "api.sock"))
        async with aiohttp.ClientSession(connector=connector) as session:
            supervisor = Supervisor(reader, writer, role, control, session)

            def play(peer: str, message: Message) -> None:
                if isinstance(message, Submit):
                    ids = [*supervisor.answer.encode(), EOS]
                    worker.send(peer, Tokens((TokenUpdate(message.rid, 0, pack_ids(ids), bytes(len(ids)), "stop", 1),)))

            loop = asyncio.get_running_loop()
            worker = Links(loop, [Link("api", *forth)], [Link("api", *back)], config.rings, play, play)
            worker.start()
            try:
                yield supervisor
            finally:
                writer.close()
                await writer.wait_closed()
                await asyncio.wait({role})
                await control.aclose()
                await worker.aclose()


def settings(folder: Path, **server: Any) -> Config:
    """One model, served by a worker that is part of the test."""
    path = str(byte_tokenizer(folder / "tok"))
    return Config(server=Server(**server), models={"small": Model(path=path, context_length=64)})


async def test_serves_drains_and_ends(tmp_path: Path) -> None:
    async with running(tmp_path, settings(tmp_path)) as supervisor:
        ready = await supervisor.receive(Ready)
        assert ready.detail["listeners"] == 2
        assert (await supervisor.session.get("http://test/ready")).status == 503
        supervisor.send(PeerState("small", "up", 1))
        async with supervisor.session.post(CHAT, json=chat_body(model="small")) as response:
            answer = await response.json()
        assert answer["choices"][0]["message"]["content"] == "hi"
        assert answer["usage"]["route"]["tokens"] == {"small": 3}
        assert (await supervisor.call("status")).result["tokens_by_model"] == {"small": 3}

        scrape = asyncio.create_task(supervisor.session.get("http://test/metrics"))
        asked = await supervisor.receive(Call)
        assert asked.verb == "metrics"
        family = metrics.gauge("requests_pending", "With a peer.", [({"model": "small"}, 4)])
        supervisor.send(Reply(asked.id, msgspec.to_builtins([family])))
        page = await (await scrape).text()
        assert 'trouterd_requests_pending{model="small"} 4.0' in page
        assert "trouterd_request_success_total" in page

        assert (await supervisor.call("drain", timeout=5.0)).result == {"cut": 0, "failed": 0}
        assert (await supervisor.session.post(CHAT, json=chat_body(model="small"))).status == 503
    assert supervisor.role.result() == 0


async def test_metrics_without_an_answer_of_the_supervisor(tmp_path: Path) -> None:
    async with running(tmp_path, settings(tmp_path)) as supervisor:
        await supervisor.receive(Ready)
        scrape = asyncio.create_task(supervisor.session.get("http://test/metrics"))
        asked = await supervisor.receive(Call)
        supervisor.send(Reply(asked.id, error="no"))
        assert "trouterd_loop_lag_seconds" in await (await scrape).text()


async def test_live_keys_are_taken_over(tmp_path: Path) -> None:
    config = settings(tmp_path)
    async with running(tmp_path, config) as supervisor:
        await supervisor.receive(Ready)
        supervisor.send(PeerState("small", "up", 1))
        changed = msgspec.structs.replace(config, server=Server(max_active_requests=1))
        args = {"key": "server.max_active_requests", "value": 1, "config": msgspec.to_builtins(changed)}
        assert (await supervisor.call("set", **args)).error == ""
        assert (await supervisor.session.post(CHAT, json=chat_body(model="small", n=2))).status == 400
        reply = await supervisor.call("abort", id="nobody")
        assert reply.refused
        assert "nobody" in reply.error


async def test_live_keys_that_change_while_it_loads_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, load = threading.Event(), main._load

    def loading(config: Config) -> Any:
        found = load(config)
        assert changed.wait(50)
        return found

    monkeypatch.setattr(main, "_load", loading)
    config = settings(tmp_path)
    async with running(tmp_path, config) as supervisor:
        now = msgspec.structs.replace(config, server=Server(max_active_requests=1))
        args = {"key": "server.max_active_requests", "value": 1, "config": msgspec.to_builtins(now)}
        assert (await supervisor.call("set", **args)).error == ""
        changed.set()
        await supervisor.receive(Ready)
        supervisor.send(PeerState("small", "up", 1))
        assert (await supervisor.session.post(CHAT, json=chat_body(model="small", n=2))).status == 400


async def test_r5_different_tokenizers_are_fatal(tmp_path: Path) -> None:
    first = byte_tokenizer(tmp_path / "a")
    second = byte_tokenizer(tmp_path / "b", extra=("<x>",))
    models = {
        "small": Model(path=str(first), context_length=64),
        "large": Model(path=str(second), context_length=64),
    }
    config = Config(models=models, routes={"demo": Route(models=["small", "large"])})
    async with running(tmp_path, config) as supervisor:
        fatal = await supervisor.receive(Fatal)
        assert "'small' and 'large'" in fatal.message
        assert await supervisor.role == 1


@pytest.mark.parametrize("content", [None, "\n"], ids=["missing", "empty"])
async def test_bad_key_file_is_fatal(tmp_path: Path, content: str | None) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
    async with running(tmp_path, settings(tmp_path, api_key_file=str(keys))) as supervisor:
        fatal = await supervisor.receive(Fatal)
        assert str(keys) in fatal.message
        assert await supervisor.role == 1


async def test_checkpoint_of_prompt_scores_that_is_not_there_is_fatal(tmp_path: Path) -> None:
    path = str(byte_tokenizer(tmp_path / "tok"))
    params = {"source": "mf", "threshold": 0.5, "checkpoint": str(tmp_path / "mf.safetensors")}
    config = Config(
        models={name: Model(path=path, context_length=64) for name in ("small", "large")},
        routes={"ask": Route(models=["small", "large"], algorithm="query", params=params)},
    )
    async with running(tmp_path, config) as supervisor:
        fatal = await supervisor.receive(Fatal)
        assert f"routes.ask.params: checkpoint: {params['checkpoint']}: No such file" in fatal.message
        assert await supervisor.role == 1
