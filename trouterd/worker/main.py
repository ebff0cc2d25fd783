"""A worker process: opens the model, attaches the rings, and runs the decode loop between two ring-reading loops.

The client loop and the peer loop are ring readers on the event loop rather than tasks of their own: a record goes from the
ring into the decode loop's inbox without waiting for a task switch, and neither of them touches request state.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from algorithms.registry import AlgorithmError
from ipc.messages import Active, Message, Submit, Warm
from models.batch import ModelRunner
from models.config import ModelError
from models.parallel.ranks import Ranks
from models.resident import is_resident
from models.script import ScriptError
from trouterd.child import CallError, Control, Refused
from trouterd.config import Config
from trouterd.control import PeerState
from trouterd.cores import available_cores
from trouterd.links import Links
from trouterd.tokenizers import load_tokenizers
from trouterd.worker.batching import Batching
from trouterd.worker.engine import Engine, Loaded, device_answers, load_model, use_device
from trouterd.worker.events import Command, ProcessState
from trouterd.worker.gauges import gauges, totals
from trouterd.worker.gpu_engine import GpuEngine
from trouterd.worker.outbound import API
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute, build_routes
from trouterd.worker.sizing import agree
from trouterd.worker.slot_setups import SlotSetups
from trouterd.worker.split import with_ranks
from trouterd.worker.tracing import Tracing
from trouterd.worker.turn import TurnError, whole_turn
from trouterd.worker.worker import Worker

log = logging.getLogger(__name__)

API_NAME = "api"
BYTES_PER_TOKEN = 5
"""Of a message: the id and its writer."""
MESSAGE_OVERHEAD = 4096
"""Most bytes of a message that are no tokens."""
LAG_INTERVAL = 0.1
"""Seconds between two looks at how late the event loop is."""
WATCH_CORES = 4
"""Cores for the api and each worker process, from which on workers that wait stay awake unless told."""


class WorkerProcess:
    """Glue between one `Worker`, its rings and the control link."""

    def __init__(self, control: Control, worker: Worker, name: str) -> None:
        self.control = control
        self.worker = worker
        self.name = name
        self.models = list(control.boot.config.models)
        self.batching = Batching(worker, name, control.config, control.boot.turn_fd)
        self.tracing = Tracing(worker)
        self.lag = 0.0
        """How late the event loop was at the last look, seconds."""
        boot = control.boot
        self.links = Links(
            asyncio.get_running_loop(),
            boot.inbound,
            boot.outbound,
            boot.config.rings,
            self._receive,
            self._receive_stale,
        )
        names = {API: API_NAME, **dict(enumerate(self.models))}
        worker.outbound.connect(lambda target, message: self.links.send(names[target], message), self.links.together)

    def register(self) -> None:
        """Answer the control link's verbs and follow the other processes' states."""
        control = self.control
        control.pong_stats = self._progress
        control.handlers.update(
            {
                "status": self._status,
                "requests": self._requests,
                "metrics": self._metrics,
                "set": self._set,
                "drain": self._drain,
                "flush-cache": self._flush_cache,
                **self.batching.handlers,
                **self.tracing.handlers,
            }
        )
        control.on_peer_state(self._on_peer_state)

    async def run(self) -> None:
        """Decode until the control link ends or a ring breaks."""
        self.links.start()
        decode = asyncio.create_task(self.worker.run(), name="decode")
        lag = asyncio.create_task(self._watch_lag(), name="lag")
        ends: list[asyncio.Future[Any]] = [decode, self.control.closed, self.links.broken]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        lag.cancel()
        self.worker.stop()
        await decode
        await self.links.aclose()

    def _index_of(self, name: str) -> int:
        return API if name == API_NAME else self.models.index(name)

    def _receive(self, peer: str, message: Message) -> None:
        del peer
        self.worker.deliver(message)

    def _receive_stale(self, peer: str, message: Message) -> None:
        """Meant for a dead predecessor. What would only start something is over: the api failed that submit, an entry that counts
        on a prompt here is asked for it again, and counts are told anew. The rest answers itself."""
        if not isinstance(message, Submit | Warm | Active):
            self._receive(peer, message)

    def _progress(self) -> tuple[int, float]:
        stepper = self.worker.stepper
        return stepper.steps, time.monotonic() - stepper.started if stepper.started else 0.0

    def _on_peer_state(self, state: PeerState) -> None:
        if state.name == self.name:
            return
        if state.state == "stalled":
            log.warning(
                "%s (pid %d, state %s) does not answer; %s",
                state.name,
                state.pid,
                state.process_state or "?",
                self.links.describe(state.name),
            )
        elif state.state == "down":
            # What it sent comes before the news of its death, or it would look like its successor's.
            self.links.catch_up(state.name)
        self.worker.deliver(ProcessState(self._index_of(state.name), state.state))

    async def _watch_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.lag = time.monotonic() - due

    # Verbs

    async def _status(self, args: dict[str, Any]) -> dict[str, Any]:
        del args
        worker = self.worker
        return {
            "model": self.name,
            "steps": worker.stats.steps,
            "tokens": worker.stats.tokens,
            "loop_lag_seconds": self.lag,
            "handoff_us": worker.stats.handoff_us(),
            **gauges(worker),
            **totals(worker),
        }

    async def _requests(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        del args
        now = time.monotonic_ns()
        return [_describe(request, now) for request in self.worker.requests.values()]

    async def _metrics(self, args: dict[str, Any]) -> Any:
        del args
        live = gauges(self.worker) | {"loop_lag_seconds": self.lag}
        families = self.worker.stats.families(self.name, self.models, live, totals(self.worker), self.links.bad_records)
        return msgspec.to_builtins([*families, *self.batching.families()])

    async def _set(self, args: dict[str, Any]) -> None:
        key: str = args["key"]
        config: Config = args["config"]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def apply() -> None:
            try:
                self._apply(key, config)
            except (AlgorithmError, Refused) as error:
                done.set_exception(Refused(str(error)))
            else:
                done.set_result(None)

        self.worker.deliver(Command(apply))
        await done

    def _apply(self, key: str, config: Config) -> None:
        """Put one live key into force; called between two steps."""
        for name, route in config.routes.items():
            # A name may hold dots: of a route 'a' beside one called 'a.b' too much is done, and nothing changed.
            if name in self.worker.routes and key.startswith(f"routes.{name}."):
                self.worker.configure(name, route)
        if key == f"models.{self.name}.max_batch_tokens":
            self._set_max_batch_tokens(config.models[self.name].max_batch_tokens)
        self.batching.configure(config)

    def _set_max_batch_tokens(self, wanted: int) -> None:
        model = self.control.boot.config.models[self.name]
        if model.gpus and wanted > model.max_batch_tokens:
            raise Refused(
                f"at most {model.max_batch_tokens} on a GPU, where memory for larger steps was given to the KV pool"
            )
        self.worker.scheduler.max_batch_tokens = wanted

    async def _drain(self, args: dict[str, Any]) -> None:
        """The api takes nothing new by now: wait until what is here has ended."""
        del args
        await self.worker.idle.wait()

    async def _flush_cache(self, args: dict[str, Any]) -> int:
        del args
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.worker.deliver(Command(lambda: done.set_result(self.worker.kv.flush())))
        return await done


def _describe(request: Request, now_ns: int) -> dict[str, Any]:
    """A request for `trouterctl requests`: never its text."""
    return {
        "rid": request.rid,
        "route": request.route.name,
        "entry": request.is_entry,
        "state": request.state.value,
        "holder": request.route.models[request.holder],
        "prompt_tokens": request.prompt_length,
        "output_tokens": request.output_length,
        "handoffs": request.handoffs,
        "age_seconds": (now_ns - request.arrived_ns) * 1e-9,
    }


async def run(control: Control) -> int:
    """Main function of the role; returns the exit code."""
    name, server = control.boot.role, control.config.server
    world = len(control.config.models[name].gpus)
    if world <= 1:
        return await _run(control, None)
    return await with_ranks(
        partial(_run, control),
        control.last_words,
        name,
        world,
        log_level=server.log_level,
        log_format=server.log_format,
    )


async def _run(control: Control, ranks: Ranks | None) -> int:
    name = control.boot.role
    device = torch.device(control.config.models[name].device)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(initializer=use_device, initargs=(device,)))
    try:
        # In a thread: heartbeats and settings must be answered meanwhile.
        loaded = await asyncio.to_thread(load_model, name, control.config, ranks)
        use_device(device)
        tokenizers = await asyncio.to_thread(load_tokenizers, control.config)
        config = control.config
        routes = build_routes(config, name, loaded.facts, {model: t.eos_ids for model, t in tokenizers.items()})
        engine = await _open(control, loaded, routes)
        worker = Worker(
            config.worker_index(name),
            routes,
            engine.runner,
            engine.kv,
            config.models[name].max_batch_tokens,
            partial(device_answers, device),
            partial(use_device, device),
            _watches(config),
        )
        if isinstance(loaded.engine, GpuEngine):
            async with _turn(control):
                await worker.prepare(partial(loaded.engine.capture, engine.runner))
    except (ModelError, ScriptError, AlgorithmError, Refused) as error:
        control.fatal(str(error))
        return 1
    except (CallError, TurnError) as error:  # another start may get further, and the other workers go on meanwhile
        log.error("%s", error)
        control.last_words(str(error))
        return 1
    return await _serve(control, worker, engine, loaded)


@asynccontextmanager
async def _turn(control: Control) -> AsyncIterator[None]:
    """Steps before the first request: models that take turns do so here as well, since each of their persistent kernels may need
    the whole GPU. Raises TurnError."""
    if control.config.batching.overlap:
        yield
        return
    async with whole_turn(control.boot.turn_fd, control.waits):
        yield


def _watches(config: Config) -> bool:
    """Whether there is a core for a worker that waits."""
    if config.rings.watch == "auto":
        processes = 1 + sum(model.tensor_parallel for model in config.models.values())
        return available_cores() >= WATCH_CORES * processes
    return config.rings.watch == "on"


async def _open(control: Control, loaded: Loaded, routes: Mapping[str, WorkerRoute]) -> Engine:
    """The engine with its KV pool: on a GPU as large as the models on it have agreed."""
    if isinstance(loaded.engine, Engine):
        return loaded.engine

    def prepare(runner: ModelRunner) -> None:
        if is_resident(runner):
            SlotSetups(runner, routes.values())  # gives it the routes, which its graphs take in

    async with _turn(control):
        claim = await asyncio.to_thread(loaded.engine.measure, prepare)
    tokens = await agree(control, claim, loaded.engine.memory)
    runner, kv = await asyncio.to_thread(loaded.engine.open, tokens)
    return Engine(runner, kv)


async def _serve(control: Control, worker: Worker, engine: Engine, loaded: Loaded) -> int:
    name, model = control.boot.role, control.config.models[control.boot.role]
    process = WorkerProcess(control, worker, name)
    needed = BYTES_PER_TOKEN * engine.runner.context_length + MESSAGE_OVERHEAD
    if needed > process.links.max_message:
        control.fatal(
            f"rings.capacity: one context of {engine.runner.context_length} tokens of model '{name}' needs a message of"
            f" {needed} bytes, the rings carry at most {process.links.max_message}; raise rings.capacity or lower"
            f" models.{name}.context_length"
        )
        return 1
    process.register()
    # What was loaded stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    control.ready(
        {
            "vocabulary": engine.runner.vocab_size,
            "context": engine.runner.context_length,
            "kv_tokens": engine.kv.capacity_tokens,
            "device": model.device,
            "dtype": model.element_type,
            "backend": loaded.backend,
        }
    )
    await process.run()
    return 1 if process.links.broken.done() else 0
