"""The api process: tokenizers, rings to the workers, and HTTP on the sockets that the supervisor opened."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from typing import Any

import msgspec
from aiohttp import web

from ipc.errors import MessageTooLargeError
from ipc.messages import Message
from models.config import ModelError
from trouterd.api.app import build_app
from trouterd.api.auth import KeyFileError, load_keys
from trouterd.api.catalog import Catalog, TokenizerMismatch
from trouterd.api.engine import EngineClient
from trouterd.api.errors import RequestError
from trouterd.api.loading import ParamChecks, context_lengths, load_tokenizers
from trouterd.api.schema import FieldCensus
from trouterd.api.services import Services
from trouterd.api.verbs import Verbs
from trouterd.child import CallError, Control
from trouterd.config import Config
from trouterd.links import Links
from trouterd.metrics import Family

log = logging.getLogger("trouterd.api")

BACKLOG = 1024
FORCE_GRACE = 0.2
"""Seconds that error frames get to reach their clients once the control link has ended."""
METRICS_TIMEOUT = 2.0
"""Seconds that workers get to answer a scrape."""


class Rings:
    """The links to the workers, attached once there is an engine client to deliver to."""

    def __init__(self) -> None:
        self.links: Links | None = None

    def send(self, worker: str, message: Message) -> bool:
        """Give a message to a worker's ring.

        Raises:
            RequestError: 400, a prompt that no ring of this capacity can carry.
        """
        if self.links is None:
            return False
        try:
            return self.links.send(worker, message)
        except MessageTooLargeError as error:
            raise RequestError(
                400, "context_length_exceeded", f"the prompt is too long for the ring: {error}"
            ) from error


async def _worker_metrics(control: Control) -> list[Family]:
    """Families of the workers that answer; a scrape never fails for one that does not."""
    try:
        async with asyncio.timeout(METRICS_TIMEOUT):
            return msgspec.convert(await control.call("metrics"), list[Family])
    except (CallError, TimeoutError, msgspec.ValidationError) as error:
        log.warning("metrics of the workers are missing: %s", error)
        return []


def _load(config: Config) -> tuple[Catalog, tuple[bytes, ...]]:
    keys = load_keys(config.server.api_key_file)
    return Catalog(config, load_tokenizers(config), context_lengths(config)), keys


async def _listen(runner: web.AppRunner, descriptors: list[int]) -> list[asyncio.AbstractServer]:
    """Serve on inherited sockets, which are bound and listening already."""
    loop = asyncio.get_running_loop()
    factory = runner.server
    if factory is None:
        raise RuntimeError("the application runner is not set up")
    servers: list[asyncio.AbstractServer] = []
    for descriptor in descriptors:
        listener = socket.socket(fileno=descriptor)
        listener.setblocking(False)
        create: Any = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        servers.append(await create(factory, sock=listener, backlog=BACKLOG))
    return servers


async def run(control: Control) -> int:
    """Main function of the role; returns the exit code."""
    config = control.config
    try:
        # In a thread: heartbeats must be answered meanwhile.
        catalog, keys = await asyncio.to_thread(_load, config)
    except (ModelError, TokenizerMismatch, KeyFileError) as error:
        control.fatal(str(error))
        return 1
    rings = Rings()
    engine = EngineClient(config, rings.send, epoch=control.boot.epoch)
    boot = control.boot
    loop = asyncio.get_running_loop()
    links = Links(loop, boot.inbound, boot.outbound, config.rings, engine.deliver, engine.deliver)
    rings.links = links
    services = Services(
        engine=engine,
        catalog=catalog,
        check_params=ParamChecks(config),
        worker_metrics=lambda: _worker_metrics(control),
        census=FieldCensus(engine.metrics),
        api_keys=keys,
    )
    app = build_app(services, max_body_bytes=config.server.max_body_bytes)
    runner = web.AppRunner(
        app, handle_signals=False, handler_cancellation=True, access_log=None, shutdown_timeout=FORCE_GRACE
    )
    await runner.setup()
    Verbs(engine, catalog).register(control)
    links.start()
    servers = await _listen(runner, boot.listen_fds)
    # What was loaded stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    control.ready({"routes": [served.name for served in catalog], "listeners": len(servers)})
    ends: list[asyncio.Future[Any]] = [control.closed, links.broken]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await _end(engine, runner, servers)
    await links.aclose()
    return 1 if links.broken.done() else 0


async def _end(engine: EngineClient, runner: web.AppRunner, servers: list[asyncio.AbstractServer]) -> None:
    """Close the doors and tell clients that still wait."""
    for server in servers:
        server.close()
    engine.drain()
    engine.force()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FORCE_GRACE):
            await engine.drained.wait()
    await runner.cleanup()
