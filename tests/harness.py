"""Workers of one route in one process and one event loop: real schedulers, caches and hand-offs, messages encoded and decoded
as on a ring. The api is the test itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ipc.messages import (
    Abort,
    Message,
    PeerReq,
    Sampling,
    Submit,
    Tokens,
    TokenUpdate,
    decode,
    encode,
    pack_ids,
    unpack_ids,
)
from models.batch import ModelRunner
from models.kv_cache import KvCache
from trouterd.config import Config, Model, Route
from trouterd.worker.outbound import API
from trouterd.worker.route import ModelFacts, build_routes
from trouterd.worker.worker import Worker

torch.set_num_threads(1)


@dataclass
class Answer:
    """What the api has received of one request."""

    tokens: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    finish: str = ""
    trim: int = 0
    handoffs: int = 0
    error: str = ""
    forwards: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, update: TokenUpdate) -> None:
        """Apply one update; a gap or a repetition is a fault of the worker."""
        assert update.seq == len(self.tokens), f"update at {update.seq}, {len(self.tokens)} tokens known"
        assert not self.finish, "an update after the finish"
        self.tokens += unpack_ids(update.ids).tolist()
        self.writers += update.writers
        self.finish, self.trim, self.handoffs, self.error = update.finish, update.trim, update.handoffs, update.error
        self.forwards, self.drafted, self.accepted = update.forwards, update.drafted, update.accepted
        self.grown.set()
        if update.finish:
            self.done.set()

    async def until(self, count: int) -> None:
        """Wait until `count` tokens are here, or the end."""
        while len(self.tokens) < count and not self.finish:
            self.grown.clear()
            await self.grown.wait()


class Cluster:
    """One worker per runner, all routes, and the client's side."""

    device: Callable[[ModelRunner], ModelRunner] = staticmethod(lambda runner: runner)
    """Put around every runner: replace it to have the same tests run on another kind of device."""

    def __init__(
        self,
        runners: Mapping[str, ModelRunner],
        routes: dict[str, Route],
        *,
        eos_ids: frozenset[int] = frozenset({257}),
        max_batch_tokens: int = 512,
        max_slots: int = 64,
        prefix_cache: bool = True,
        num_pages: int | None = None,
        defer: Mapping[str, torch.Tensor] | None = None,
        watches: bool = False,
    ) -> None:
        self.config = Config(models={name: Model(path=name) for name in runners}, routes=routes)
        self.names = list(runners)
        self.answers: dict[int, Answer] = {}
        self.trace: list[PeerReq] = []
        """Every PeerReq, in the order of sending."""
        self.accept: Callable[[int, int, Message], bool] = lambda *_: True
        """Replace it to refuse messages (False = ring and spill full) or to see them go by."""
        self.hold: Callable[[int, int, Message], bool] = lambda *_: False
        """True keeps a message back in `held` instead of delivering it."""
        self.held: list[tuple[int, int, Message]] = []
        self._rids = itertools.count(1)
        self._eos_ids = eos_ids
        self._max_batch_tokens = max_batch_tokens
        self._defer = defer or {}
        """Deferral rows, by model."""
        self._watches = watches
        self._cache = (max_slots, prefix_cache, num_pages)
        self.workers: dict[str, Worker] = {}
        for name, runner in runners.items():
            self.open_worker(name, runner)

    def open_worker(self, name: str, runner: ModelRunner) -> Worker:
        """A worker without any state, in place of the one that had the name before."""
        max_slots, prefix_cache, num_pages = self._cache
        runner = self.device(runner)
        device, defer = torch.device("cpu"), self._defer.get(name)
        facts = ModelFacts(runner.vocab_size, runner.hidden_size, device, runner.embedding, defer)
        pages = runner.num_pages if num_pages is None else num_pages
        kv = KvCache(pages, runner.page_size, max_slots, runner.context_length, prefix_cache)
        compiled = build_routes(self.config, name, facts, dict.fromkeys(self.names, self._eos_ids))
        index = self.names.index(name)
        worker = self.workers[name] = Worker(index, compiled, runner, kv, self._max_batch_tokens, watches=self._watches)
        worker.outbound.connect(self._sender(index))
        return worker

    def _sender(self, source: int) -> Callable[[int, Message], bool]:
        def send(target: int, message: Message) -> bool:
            if not self.accept(source, target, message):
                return False
            payload, kind = encode(message)
            copy = decode(kind, payload)
            if isinstance(copy, PeerReq):
                self.trace.append(copy)
            if self.hold(source, target, copy):
                self.held.append((source, target, copy))
            else:
                self.deliver(target, copy)
            return True

        return send

    def deliver(self, target: int, message: Message) -> None:
        """Put a message into a worker's inbox, or the api's."""
        if target != API:
            self.workers[self.names[target]].deliver(message)
            return
        assert isinstance(message, Tokens)
        for update in message.updates:
            if update.rid in self.answers:
                self.answers[update.rid].take(update)

    def submit(
        self,
        route: str,
        prompt: Sequence[int],
        params: dict[str, float] | None = None,
        score: float | None = None,
        **sampling: Any,
    ) -> tuple[int, Answer]:
        """Send a request to its entry; greedy and 32 tokens unless said otherwise."""
        rid = next(self._rids)
        values = {"seed": 0, "max_tokens": 32, "temperature": 0.0} | sampling
        answer = self.answers[rid] = Answer()
        self.deliver(self._entry(route), Submit(rid, route, pack_ids(prompt), Sampling(**values), params or {}, score))
        return rid, answer

    def abort(self, rid: int, route: str) -> None:
        """What the api does when a client goes away."""
        self.answers.pop(rid, None)
        self.deliver(self._entry(route), Abort(rid))

    def _entry(self, route: str) -> int:
        return self.names.index(self.config.all_routes()[route].models[0])

    async def generate(
        self,
        route: str,
        prompt: Sequence[int],
        params: dict[str, float] | None = None,
        score: float | None = None,
        **sampling: Any,
    ) -> Answer:
        """Submit and wait for the end."""
        _, answer = self.submit(route, prompt, params, score, **sampling)
        await answer.done.wait()
        return answer

    async def settled(self) -> None:
        """Wait until no worker holds a request any more, then check that all pages are accounted for."""
        async with asyncio.timeout(30):
            for worker in self.workers.values():
                await worker.idle.wait()
        for worker in self.workers.values():
            worker.kv.check()
            assert worker.kv.counts()["owned"] == 0
            assert worker.scheduler.counts() == {"waiting": 0, "running": 0, "away": 0}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        """The decode loops run inside this block; a loop that dies fails the test."""
        tasks = [asyncio.create_task(w.run()) for w in self.workers.values()]
        try:
            yield self
        finally:
            for worker in self.workers.values():
                worker.stop()
            await asyncio.gather(*tasks)
