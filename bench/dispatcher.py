"""The dispatcher of Std. Serving: an OpenAI server that asks servers of single models for one token a call.

    python -m bench.dispatcher --config FILE --socket PATH --server MODEL=SOCKET --server MODEL=SOCKET

Every call carries the whole text so far, as ids, and is a new request to its server, which has seen most of it before: its prefix
cache is what spares it the rest. Which model is asked next, and whether its token is kept, is decided between two calls by the
route's own algorithm, so that a dispatcher and a trouterd of one configuration make the same moves for the same seeds. Only
algorithms that look at positions and draws alone can be decided out here: servers return tokens, no logits.

Clients are served by trouterd's own api, with this in the place of its workers: both systems read requests, turn ids into text and
stream in the same way. GET /counters says who wrote how much. Ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
import uvloop
from aiohttp import web

from algorithms.registry import AlgorithmError
from bench.blind_routes import Destinations, Sides, blind_routes
from bench.command_line import run_command
from bench.one_token import ModelServer, ServerError
from ipc.messages import Abort, Message, Submit, Tokens, TokenUpdate, pack_ids
from models.config import ModelError
from trouterd.api.app import build_app
from trouterd.api.catalog import Catalog, TokenizerMismatch
from trouterd.api.engine import EngineClient
from trouterd.api.loading import ParamChecks, context_lengths
from trouterd.api.schema import FieldCensus
from trouterd.api.scores import Scores
from trouterd.api.services import Services
from trouterd.config import Config
from trouterd.control import PeerState
from trouterd.metrics import Family
from trouterd.settings import ConfigError, load
from trouterd.tokenizers import load_tokenizers
from trouterd.worker.decision import FAILED, first_writer
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute

READY = "ready"
"""The line on standard output that says so."""


class Dispatcher:
    """Writes answers, one task each; stands where the api has its workers.

    Args:
        sides: of `blind_routes`.
        servers: by model.
        deliver: takes what is written.
    """

    def __init__(self, sides: Sides, servers: Mapping[str, ModelServer], deliver: Callable[[Tokens], None]) -> None:
        self._sides = sides
        self._servers = servers
        self._deliver = deliver
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.counters = {name: {"tokens": 0, "handoffs": 0} for name in servers}
        """By model: tokens that it wrote and that were kept, and requests that went from it to another one."""

    def send(self, worker: str, message: Message) -> bool:
        """Take a request, or forget one."""
        del worker  # the entry, which the route knows
        if isinstance(message, Submit):
            self._tasks[message.rid] = asyncio.create_task(self._answer(message))
        elif isinstance(message, Abort) and (task := self._tasks.get(message.rid)) is not None:
            task.cancel()
        return True

    async def aclose(self) -> None:
        """End what is being written."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, submit: Submit) -> None:
        sides = self._sides[submit.route]
        request, destinations = Request.open(submit, sides[0], 0, time.monotonic_ns()), Destinations()
        try:
            self._move(request, sides, first_writer(request))
            while not request.finish:
                await self._step(request, sides, destinations)
        except ServerError as error:
            self._fail(request, str(error), error.status)
        finally:
            del self._tasks[submit.rid]

    async def _step(self, request: Request, sides: Sequence[WorkerRoute], destinations: Destinations) -> None:
        """One call, and what follows from its token."""
        begun = time.monotonic_ns()
        token = await self._servers[_writer(request)].token(request)
        if request.route.side:
            request.pending_ns += time.monotonic_ns() - begun
        request.forwards[request.route.side] += 1
        destination = destinations.after(request)
        if destination == 0 or request.route.algorithm.keep_sample:
            self._commit(request, token)
        if not request.finish:
            self._move(request, sides, destination)

    def _move(self, request: Request, sides: Sequence[WorkerRoute], destination: int) -> None:
        """The request is its next writer's."""
        if destination == FAILED:
            raise ServerError("the route's algorithm failed on this answer", 500)
        if destination:
            self.counters[_writer(request)]["handoffs"] += 1
            request.handoffs += 1
            request.stall += 1
            request.route = sides[request.route.model_at(destination)]

    def _commit(self, request: Request, token: int) -> None:
        self.counters[_writer(request)]["tokens"] += 1
        request.finish, request.trim = request.finish_reason(token)
        request.append(token, request.route.side)
        update = TokenUpdate(
            rid=request.rid,
            seq=request.output_length - 1,
            ids=pack_ids([token]),
            writers=bytes([request.route.side]),
            finish=request.finish,
            trim=request.trim,
            handoffs=request.handoffs,
            pending_us=request.pending_ns // 1000,
            forwards=tuple(request.forwards),
        )
        self._deliver(Tokens((update,)))

    def _fail(self, request: Request, message: str, status: int) -> None:
        update = TokenUpdate(request.rid, request.output_length, b"", b"", "error", error=message, status=status)
        self._deliver(Tokens((update,)))


def _writer(request: Request) -> str:
    """The model that has the request."""
    return request.route.models[request.route.side]


async def _no_metrics() -> list[Family]:
    return []


async def serve(config: Config, socket: Path, sockets: Mapping[str, str]) -> None:
    """Serve until standard input ends.

    Args:
        config: models and routes.
        socket: where to listen.
        sockets: of each model's server.

    Raises:
        AlgorithmError, ModelError, TokenizerMismatch: of a route or a model.
    """
    tokenizers = load_tokenizers(config)
    sides = blind_routes(
        config, {name: one.eos_ids for name, one in tokenizers.items()}, next(iter(tokenizers.values())).vocab_size
    )
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(ModelServer(name, path)) for name, path in sockets.items()}
        dispatcher = Dispatcher(sides, servers, lambda tokens: engine.deliver("", tokens))
        engine = EngineClient(config, dispatcher.send)
        for name in config.models:
            engine.on_peer_state(PeerState(name=name, state="up", epoch=1))
        services = Services(
            engine=engine,
            catalog=Catalog(config, tokenizers, context_lengths(config)),
            check_params=ParamChecks(config),
            scores=Scores(config),
            worker_metrics=_no_metrics,
            census=FieldCensus(engine.metrics),
        )
        app = build_app(services, max_body_bytes=config.server.max_body_bytes)

        async def counters(request: web.Request) -> web.Response:
            del request
            return web.json_response(dispatcher.counters)

        app.router.add_get("/counters", counters)
        runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(dispatcher.aclose)
        await web.UnixSite(runner, str(socket)).start()
        print(READY, flush=True)
        await _end_of_input()


async def _end_of_input() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def look() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin)
            ended.set()

    loop.add_reader(sys.stdin, look)
    await ended.wait()


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.dispatcher", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="models and routes, as of trouterd")
    parser.add_argument("--socket", type=Path, required=True, metavar="PATH", help="where to listen")
    parser.add_argument(
        "--server",
        action="append",
        required=True,
        type=lambda text: text.split("=", 1),
        metavar="MODEL=SOCKET",
        help="unix socket of a model's server; once for each model",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        config = load(options.config, os.environ)
        if missing := config.models.keys() - dict(options.server):
            parser.error(f"--server: none for {', '.join(sorted(missing))}")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, options.socket, dict(options.server)))
    except (AlgorithmError, ConfigError, ModelError, TokenizerMismatch) as error:
        print(f"bench.dispatcher: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_command("bench.dispatcher", lambda: main(sys.argv[1:]))
