"""The whole service in one event loop: HTTP application, engine client and real workers.

Messages are encoded and decoded on their way, as on a ring; there are no processes, rings or supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from prometheus_client.parser import text_string_to_metric_families

from ipc.messages import Message, Tokens
from models.batch import Batch, ModelRunner, StepOutput
from models.script import ScriptRunner, Step
from models.tokenizer import Tokenizer
from models.torch_runner import TorchRunner
from tests.api.harness import Client, listening
from tests.harness import Cluster
from tests.models.tiny import EOS
from trouterd.api.catalog import Catalog
from trouterd.api.engine import EngineClient
from trouterd.api.loading import ParamChecks
from trouterd.api.schema import FieldCensus
from trouterd.api.scores import Scores
from trouterd.api.services import Services
from trouterd.config import Route, Server
from trouterd.metrics import Family
from trouterd.worker.gauges import gauges, totals
from trouterd.worker.outbound import API
from trouterd.worker.worker import Worker

SMALL, LARGE = 0, 1
"""Worker indices of the two models of most tests."""
VOCAB = 258
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Stack(Cluster):
    """Workers with the real api in front of them."""

    def __init__(
        self,
        runners: Mapping[str, ModelRunner],
        routes: dict[str, Route],
        tokenizer: Tokenizer,
        *,
        server: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(runners, routes, **settings)
        self.config = msgspec.structs.replace(self.config, server=Server(**(server or {})))
        self.engine = EngineClient(self.config, self._to_worker)
        contexts = {name: runner.context_length for name, runner in runners.items()}
        self.services = Services(
            engine=self.engine,
            catalog=Catalog(self.config, dict.fromkeys(runners, tokenizer), contexts),
            check_params=ParamChecks(self.config),
            scores=Scores(self.config),
            worker_metrics=self._families,
            census=FieldCensus(self.engine.metrics),
        )

    @property
    def small(self) -> Worker:
        """The first worker."""
        return self.workers[self.names[SMALL]]

    @property
    def large(self) -> Worker:
        """The second worker."""
        return self.workers[self.names[LARGE]]

    def deliver(self, target: int, message: Message) -> None:
        """Into a worker's inbox, or to the api."""
        if target == API:
            assert isinstance(message, Tokens)
            self.engine.deliver(self.names[SMALL], message)
        else:
            super().deliver(target, message)

    def release(self) -> None:
        """Deliver what was held back, and hold nothing more."""
        self.hold = lambda *_: False
        held, self.held = self.held, []
        for _source, target, message in held:
            self.deliver(target, message)

    @contextlib.asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[Client]:
        """A client of the running service; in the end nothing may be left in the workers and pages balance."""
        async with self.running(), listening(folder, self.services, self.config) as (session, socket):
            client = Client(session, self.services, socket)
            for name in self.names:
                client.report(name, "up")
            yield client
            await self.settled()
            assert self.engine.active == 0
            assert self.engine.report() == []

    def _to_worker(self, worker: str, message: Message) -> bool:
        return self._sender(API)(self.config.worker_index(worker), message)

    async def _families(self) -> list[Family]:
        return [
            family
            for name, worker in self.workers.items()
            for family in worker.stats.families(name, self.names, gauges(worker), totals(worker), 0)
        ]


class Gate:
    """A runner that stops before one of its steps until it is told to go on."""

    inline = False

    def __init__(self, runner: ModelRunner, *, before: int = 0) -> None:
        self.vocab_size = runner.vocab_size
        self.hidden_size = runner.hidden_size
        self.embedding = runner.embedding
        self.context_length = runner.context_length
        self.page_size = runner.page_size
        self.num_pages = runner.num_pages
        self.before = before
        """Number of the step, from 0, that waits."""
        self.reached = asyncio.Event()
        self.steps = 0
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._opened = threading.Event()

    def step(self, batch: Batch) -> StepOutput:
        """The runner's, when the gate is open."""
        if self.steps == self.before:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._opened.wait(50), "nobody opened the gate"
        self.steps += 1
        return self._runner.step(batch)

    def open(self) -> None:
        """Let the step that waits go on."""
        self._opened.set()


def script(steps: Sequence[Step] | Callable[[int], Step], **settings: Any) -> ScriptRunner:
    """A runner for ByteTok that replays ids."""
    return ScriptRunner(steps, **({"vocab_size": VOCAB, "eos": EOS} | settings))


def tiny(path: Path, **settings: Any) -> TorchRunner:
    """A runner for a tiny model directory."""
    torch.set_num_threads(1)
    return TorchRunner.load(path, **({"num_pages": 256, "page_size": 16, "vocab_size": VOCAB} | settings))


def route(algorithm: str = "none", models: Sequence[str] = ("small", "large"), **params: Any) -> Route:
    """A route over the two models."""
    return Route(models=list(models), algorithm=algorithm, params=params)


def blocks(n: int) -> dict[str, Route]:
    """Route "demo": n tokens of the small model, n of the large one, and so on."""
    return {"demo": route("every_n", shape="block", n=n)}


def visits(n: int) -> dict[str, Route]:
    """Route "demo": every n-th token is the large model's."""
    return {"demo": route("every_n", shape="visit", n=n)}


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for something that has no event."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def samples(client: Client) -> dict[tuple[str, ...], float]:
    """GET /metrics: (name, label=value ...) -> value, without the prefix."""
    async with client.session.get("http://test/metrics") as response:
        page = await response.text()
    return {
        (sample.name.removeprefix("trouterd_"), *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def chunks(response: aiohttp.ClientResponse, count: int) -> bytes:
    """Read a stream until it has brought `count` data frames."""
    received = b""
    while received.count(b"data: ") < count:
        received += await response.content.readany()
    return received
