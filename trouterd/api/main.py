"""The api process: tokenizers, rings to the workers, and HTTP on the sockets that the supervisor opened."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from typing import Any

import msgspec
from aiohttp import web

from models.config import ModelError
from trouterd.api.app import build_app
from trouterd.api.auth import KeyFileError, load_keys
from trouterd.api.batching import Batching
from trouterd.api.catalog import Catalog, TokenizerMismatch
from trouterd.api.engine import FORCE_GRACE, EngineClient
from trouterd.api.loading import ParamChecks, context_lengths
from trouterd.api.schema import FieldCensus
from trouterd.api.scores import ScoreError, Scores
from trouterd.api.services import Services
from trouterd.api.verbs import Verbs
from trouterd.child import CallError, Control
from trouterd.config import Config
from trouterd.links import Links
from trouterd.metrics import Family
from trouterd.tokenizers import load_tokenizers

log = logging.getLogger("trouterd.api")

BACKLOG = 1024
METRICS_TIMEOUT = 2.0
"""Seconds that workers get to answer a scrape."""


async def _metrics(control: Control, batching: Batching) -> list[Family]:
    """Families of the controller and of the workers that answer; a scrape never fails for one that does not."""
    own = batching.families()
    try:
        async with asyncio.timeout(METRICS_TIMEOUT):
            return [*own, *msgspec.convert(await control.call("metrics"), list[Family])]
    except (CallError, TimeoutError, msgspec.ValidationError) as error:
        log.warning("metrics of the workers are missing: %s", error)
        return own


def _load(config: Config) -> tuple[Catalog, tuple[bytes, ...], Scores]:
    keys = load_keys(config.server.api_key_file)
    return Catalog(config, load_tokenizers(config), context_lengths(config)), keys, Scores(config)


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
        catalog, keys, scores = await asyncio.to_thread(_load, config)
    except (ModelError, TokenizerMismatch, KeyFileError, ScoreError) as error:
        control.fatal(str(error))
        return 1
    boot = control.boot
    engine = EngineClient(config, lambda worker, message: links.send(worker, message), epoch=boot.epoch)
    loop = asyncio.get_running_loop()
    links = Links(loop, boot.inbound, boot.outbound, config.rings, engine.deliver, engine.deliver)
    batching = await asyncio.to_thread(Batching, control)
    checks = ParamChecks(config)
    services = Services(
        engine=engine,
        catalog=catalog,
        check_params=checks,
        scores=scores,
        worker_metrics=lambda: _metrics(control, batching),
        census=FieldCensus(engine.metrics),
        api_keys=keys,
    )
    app = build_app(services, max_body_bytes=config.server.max_body_bytes)
    runner = web.AppRunner(
        app, handle_signals=False, handler_cancellation=True, access_log=None, shutdown_timeout=FORCE_GRACE
    )
    # The application logs its own failures; what is left to this logger is a traceback for each malformed HTTP request.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    await runner.setup()
    verbs = Verbs(engine, catalog, checks, scores)
    verbs.register(control)
    try:
        # Settings may have changed while all of that was loaded, when nobody but the control link knew of them.
        verbs.configure(control.config)
    except ScoreError as error:
        control.fatal(str(error))
        return 1
    batching.register()
    links.start()
    servers = await _listen(runner, boot.listen_fds)
    # What was loaded stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    control.ready({"routes": [served.name for served in catalog], "listeners": len(servers)})
    controlling = asyncio.create_task(batching.run(), name="batching")
    ends: list[asyncio.Future[Any]] = [control.closed, links.broken]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    controlling.cancel()
    await _end(engine, runner, servers)
    await links.aclose()
    return 1 if links.broken.done() else 0


async def _end(engine: EngineClient, runner: web.AppRunner, servers: list[asyncio.AbstractServer]) -> None:
    """Close the doors and tell clients that still wait."""
    for server in servers:
        server.close()
    await engine.drain(0)
    await runner.cleanup()
