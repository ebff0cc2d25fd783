"""What serving needs for the first time is there: the start has launched every variant of every kernel.

Without a GPU: what Triton would compile is known from the arguments of launches (`tests.models.cuda.variants`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.9")

from algorithms.base import RouteContext, StepResult
from algorithms.r2r import R2REntry, R2RParams
from models.batch import StepOutput
from models.cuda.decoder import CudaDecoder
from models.device_runner import DeviceRunner
from models.parallel.exchange import layout_of, pack_rows, unpack_rows
from models.resident import NO_ROUTE, OWN_TOKEN, DeviceRoute, RoutedRows, SlotSetup, StepRows
from models.rows import Rows
from models.script import ScriptRunner
from tests.harness import Cluster
from tests.models.cuda import stage
from tests.models.cuda.router import Sizes, router_file
from tests.models.cuda.variants import Variants, watch
from tests.models.tiny import tiny_qwen3
from tests.worker.resident import FakeResident
from tests.worker.test_gpu_engine import Device
from trouterd.config import Model, Route
from trouterd.worker.gpu_engine import DecoderWeights, GpuEngine

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

CONTEXT = 5000
HIDDEN = 512
"""The least for the router's kernels."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_qwen3(tmp_path_factory.mktemp("tiny"), context=CONTEXT, hidden=HIDDEN, layers=1, heads=16)
    router_file(folder / "router.pt", Sizes(HIDDEN, blocks=1, expansion=1), threshold=0.5)
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Variants:
    return watch(monkeypatch)


class Kernel:
    """The persistent kernel's shape: logits of few rows have another pitch than a product's."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self.decoder = decoder

    def attach(self) -> None:
        self.decoder.fast_path = self

    def detach(self) -> None:
        self.decoder.fast_path = None

    def takes(self, rows: Rows) -> bool:
        return 0 < len(rows) <= 12 and len(rows.logit_rows) <= 12

    def forward(self, rows: Rows) -> StepOutput:
        count = len(rows.logit_rows)
        return StepOutput(
            torch.empty(count, self.decoder.vocab_size), torch.empty(count, HIDDEN, dtype=self.decoder.dtype)
        )


def routes(directory: Path, decoder: CudaDecoder) -> list[DeviceRoute]:
    """R2R in kernels of its own, and in torch but for the largest logits; one that looks at nothing."""
    context = RouteContext(
        ("small", "large"), 0, decoder.vocab_size, HIDDEN, torch.device("cpu"), decoder.weights.embedding
    )

    def route(name: str, **params: Any) -> DeviceRoute:
        side = R2REntry(context, R2RParams(checkpoint=str(directory / "router.pt"), **params))

        def decide(rows: RoutedRows) -> torch.Tensor:
            return side.route(StepResult(**{field: getattr(rows, field) for field in rows.__slots__}, state=[]))

        return DeviceRoute(name, decide, ("threshold",))

    return [
        route("kernels", dtype="bfloat16"),
        route("torch"),
        DeviceRoute("never", lambda rows: torch.zeros_like(rows.tokens), ("p", "q")),
    ]


@dataclass
class Served:
    """A model after its start."""

    runner: DeviceRunner
    routes: Sequence[DeviceRoute]
    max_batch_tokens: int
    launched: list[StepRows] = field(default_factory=list)

    @classmethod
    def start(cls, directory: Path, *, kernel: bool, **keys: Any) -> Served:
        decoder = CudaDecoder.load(directory, device="cpu", dtype="bfloat16", page_size=16)
        model = Model(path=str(directory), device="cuda:0", max_requests=160, **keys)
        weights = DecoderWeights(decoder, model, Kernel(decoder) if kernel else None)
        engine, all_routes = GpuEngine("m", model, weights, CONTEXT, Device(1 << 60)), routes(directory, decoder)

        def prepare(runner: Any) -> None:
            assert all(runner.set_routes(all_routes))

        engine.measure(prepare)
        runner, _ = engine.open(20 * CONTEXT)
        assert isinstance(runner, DeviceRunner)
        prepare(runner)
        engine.capture(runner)
        return cls(runner, all_routes, model.max_batch_tokens)

    def step(self, chance: random.Random, rows: int) -> None:
        """Decodes, extends and chunks of prompts, some of them without a token; on no route, on one or on several."""
        single = chance.randrange(-1, len(self.routes))
        mixed = chance.random() < 0.5
        silent = chance.random() < 0.2
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for slot in range(160):
            count = min(rows - len(tokens), chance.choice((1, 1, 3, chance.randrange(1, rows + 1))))
            if not count:
                break
            own = count == 1 and chance.random() < 0.5
            start = chance.choice((0, chance.randrange(CONTEXT - count)))
            tokens += [OWN_TOKEN if own else 7] * count
            positions += range(start, start + count)
            slots += [slot] * count
            if own or not (silent or chance.random() < 0.3):
                wanted.append(len(tokens) - 1)
                self.runner.setup(self.asked(slot, chance.randrange(-1, len(self.routes)) if mixed else single))
        given = StepRows(*(np.array(column, np.int64) for column in (slots, tokens, positions, wanted)))
        self.launch(given)

    def decode(self, requests: int, each: int) -> None:
        """So many rows of each request, of which the last gives a token."""
        rows = requests * each
        for slot in range(requests):
            self.runner.setup(self.asked(slot, NO_ROUTE))
        every = np.arange(rows)
        slots, places = np.divmod(every, each)
        self.launch(StepRows(slots, np.full(rows, 7), places, every[each - 1 :: each]))

    def launch(self, rows: StepRows) -> None:
        self.launched.append(rows)
        self.runner.launch(rows)
        self.runner.poll()

    def asked(self, slot: int, route: int) -> SlotSetup:
        params = (0.5,) * (len(self.routes[route].params) if route != NO_ROUTE else 0)
        return SlotSetup(slot, 1, 100, 0, (), 1.0, 50, 0.9, 0.01, slot, 0, route, route != NO_ROUTE, params)


CASES: dict[str, dict[str, Any]] = {
    "as configured": {},
    "without graphs": {"graphs": False},
    "without graphs of extends": {"extend_graphs": False},
    "large steps": {"max_batch_tokens": 5000},
}


# Large steps take the interpreter of the tests longest: without the kernel, which small steps alone go by, in the long run.
@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        pytest.param(case, kernel, marks=[pytest.mark.slow] if (case, kernel) == ("large steps", False) else [])
        for case in CASES
        for kernel in (False, True)
    ],
)
def test_serving_compiles_nothing(directory: Path, seen: Variants, case: str, kernel: bool) -> None:
    served = Served.start(directory, kernel=kernel, **CASES[case])
    assert {"_list_tasks", "_paged_attention", "choose", "finish", "_combine", "_select"} <= {name for name, _ in seen}
    known, chance = set(seen), random.Random(1)
    for trial in range(120):
        most = served.max_batch_tokens
        served.step(chance, chance.randrange(257, most + 1) if trial % 2 else chance.randrange(1, most + 1))
    for requests in (2, 14, 40, 60, 100, 150):
        for each in (1, 2, 3):
            served.decode(requests, each)
    assert not {name for name, _ in seen - known}
    eager = [rows for rows in served.launched if not served.runner.quick(rows)]
    assert {len(rows) % 4 for rows in eager} == {0, 1, 2, 3}
    assert {len(rows.logit_rows) for rows in served.launched} >= {0, 1, 3, 7}


async def scheduled() -> dict[str, list[StepRows]]:
    """By model, the steps of two workers: 16 prompts, one after the other, are read and answered by both."""
    runners = {
        name: FakeResident(
            ScriptRunner(lambda _: 7, vocab_size=32, eos=0, num_pages=4096), dice=random.Random(1), patience=3
        )
        for name in ("small", "large")
    }
    route = Route(models=["small", "large"], algorithm="bernoulli", params={"p": 0.35})
    async with Cluster(runners, {"demo": route}).running() as cluster:
        answers = []
        for place in range(16):
            prompt = [place + 1] * (164 + 128 * place)
            answers.append(cluster.submit("demo", prompt, max_tokens=20, seed=place, ignore_eos=True)[1])
            for _ in range(place % 4):
                await asyncio.sleep(0)
        for answer in answers:
            await answer.done.wait()
        await cluster.settled()
    return {name: runner.launched for name, runner in runners.items()}


@pytest.mark.parametrize("case", ["as configured", "without graphs"])
async def test_a_load_that_workers_schedule_compiles_nothing(directory: Path, seen: Variants, case: str) -> None:
    steps = await scheduled()
    assert any(not len(rows.logit_rows) and len(rows) % 4 == 2 for rows in steps["large"]), "prompts are read ahead"
    served = Served.start(directory, kernel=True, **CASES[case])
    known = set(seen)
    for name, launched in steps.items():
        for slot in range(64):
            served.runner.setup(served.asked(slot, 0 if name == "small" else 2))
        for rows in launched:
            served.launch(rows)
    assert not {name for name, _ in seen - known}


def test_what_the_start_leaves_out_is_seen(directory: Path, seen: Variants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trouterd.worker.gpu_engine.GpuEngine.measure", lambda self, prepare: None)
    monkeypatch.setattr(DecoderWeights, "exercise", lambda *_: None)
    served = Served.start(directory, kernel=False, extend_graphs=False)
    known, chance = set(seen), random.Random(2)
    for _ in range(20):
        served.step(chance, 400)
    assert {name for name, _ in seen - known} == {"_list_tasks", "_paged_attention", "FlashInfer"}


def test_ranks_that_get_rows_packed_compile_nothing_either(directory: Path, seen: Variants) -> None:
    decoder = CudaDecoder.load(directory, device="cpu", dtype="bfloat16", page_size=16)
    decoder.allocate_kv(8)
    table = stage.page_table(4, 128, 16)
    for count in (1, 8):
        decoder.forward(stage.device_rows([(0, 0, [1] * count), (1, 0, [1] * count)], table, "cpu", last_only=True))
    known = set(seen)
    for count in range(1, 9):
        for slots in (1, 2, 3):
            runs = [(slot, 0, [1] * count) for slot in range(slots)]
            rows = stage.device_rows(runs, table, "cpu", last_only=True)
            decoder.forward(unpack_rows(pack_rows(rows), layout_of(rows)))
    assert seen == known
