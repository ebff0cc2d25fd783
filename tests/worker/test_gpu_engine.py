"""Measuring a model and giving it a KV pool, with a GPU's memory counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from models.batch import ModelRunner
from models.config import ModelConfig, ModelError
from models.cuda import products
from models.cuda.decoder import RAGGED_KEYS
from models.device_runner import DeviceRunner
from models.resident import DeviceRoute, RoutedRows
from models.shape import load_shape
from models.torch_rows import TorchRows
from models.torch_runner import TorchRunner
from tests.models.tiny import tiny_qwen3
from trouterd.config import Model
from trouterd.memory import Footprint, Memory
from trouterd.worker import engine as engine_module
from trouterd.worker.gpu_engine import DecoderWeights, GpuEngine, TorchWeights
from trouterd.worker.trial_step import TrialStep, first_steps, largest_steps

torch.set_num_threads(1)
PAGE = 4


class Device:
    """Counts bytes as an allocator would: what is held, and the most that was."""

    def __init__(self, total: int = 10_000) -> None:
        self.total = total
        self.parts: dict[str, int] = {}
        self.highest = 0

    def hold(self, part: str, size: int) -> None:
        self.parts[part] = size
        if sum(self.parts.values()) > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.")
        self.highest = max(self.highest, sum(self.parts.values()))

    def held(self) -> int:
        return sum(self.parts.values())

    def start_peak(self) -> None:
        self.highest = self.held()

    def peak(self) -> int:
        return self.highest

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.held(), self.total

    def every_device(self) -> list[tuple[int, int]]:
        return [self.free_and_total()]


class Accounted:
    """`Weights` of 400 bytes with graphs of 80 and steps of 3 bytes a row, over no model at all."""

    page_bytes = 10

    def __init__(self, device: Device) -> None:
        self.device = device
        self.steps: list[TrialStep] = []
        self.order: list[str] = []
        device.hold("weights", 400)

    def runner(self, num_pages: int, max_slots: int, max_pages: int) -> ModelRunner:
        self.order.append(f"pool of {num_pages}")
        self.device.hold("kv", num_pages * self.page_bytes)
        return None  # type: ignore[return-value]

    def capture(self, runner: ModelRunner) -> None:
        self.order.append("capture")
        self.device.hold("graphs", 80)

    def exercise(self, runner: ModelRunner, step: TrialStep) -> None:
        self.order.append("step")
        self.steps.append(step)
        self.device.hold("step", 3 * sum(step.counts))
        self.device.hold("step", 0)

    def release(self) -> None:
        self.device.hold("kv", 0)
        self.device.hold("graphs", 0)


def model(**keys: object) -> Model:
    return Model(path="m", device="cuda:1", page_size=PAGE, max_batch_tokens=32, max_requests=5, **keys)  # type: ignore[arg-type]


def engine(device: Device, context: int = 100, **keys: object) -> tuple[GpuEngine, Accounted]:
    weights = Accounted(device)
    return GpuEngine("m", model(**keys), weights, context, device), weights


def test_all_that_a_model_takes_is_measured_and_given_back() -> None:
    device = Device()
    one, weights = engine(device)
    claim = one.measure(lambda runner: weights.order.append("prepare"))
    assert claim.footprint == Footprint(weights=400, graphs=80, workspace=96, kv_bytes_per_token=3)
    assert (claim.page_size, claim.context, claim.most, claim.fixed_tokens) == (PAGE, 100, 500, 0)
    order = ["pool of 25", "prepare", *["step"] * 3, "capture", *["step"] * 2]
    assert weights.order == order, "graphs take the routes in, and the first steps are tried without them"
    assert device.held() == 400
    assert one.memory() == {1: Memory(total=10_000, free=9_600)}


def test_number_of_its_own_is_claimed() -> None:
    one, _ = engine(Device(), kv_tokens=200)
    assert one.measure(lambda runner: None).fixed_tokens == 200


def test_opened_with_whole_pages() -> None:
    device = Device()
    one, weights = engine(device)
    runner, kv = one.open(203)
    assert kv.capacity_tokens == 200
    assert kv.page_table.shape == (5, 25)
    assert "graphs" not in device.parts, "captured when the runner knows its routes"
    weights.order.clear()
    one.capture(runner)
    assert device.parts["graphs"] == 80
    assert weights.order == ["step", "capture"]


@pytest.mark.parametrize(
    ("total", "act", "words"),
    [
        (
            500,
            lambda one: one.measure(lambda runner: None),
            "models.m.context_length: no memory for one context of 100",
        ),
        (
            500,
            lambda one: one.open(400),
            "gpu.memory_fraction: no memory for a KV pool of 400 tokens beside the weights",
        ),
        (450, lambda one: one.capture(None), "gpu.memory_fraction: no memory for CUDA graphs"),
    ],
)
def test_lack_of_memory_is_one_line(total: int, act: Callable[[GpuEngine], object], words: str) -> None:
    one, _ = engine(Device(total))
    with pytest.raises(ModelError, match=words) as caught:
        act(one)
    assert "\n" not in str(caught.value)


def test_largest_steps_are_as_large_as_they_can_get() -> None:
    prompt, many = largest_steps(model(), 100)
    assert (prompt.counts, prompt.wanted) == ((32,), 1)
    assert (many.counts, many.wanted) == ((1, 1, 1, 1, 28), 5)
    short, *_ = largest_steps(model(), 20)
    assert short.counts == (20,)
    (only,) = largest_steps(Model(path="m", max_requests=1), 4096)
    assert only.counts == (512,)


def test_every_kind_of_step_is_tried_before_anybody_waits_for_it() -> None:
    def rows(context: int = 4096, **keys: object) -> list[int]:
        tried = list(first_steps(Model(path="m", **keys), context))  # type: ignore[arg-type]
        assert all(step.rows().positions.max() < context for step in tried)
        *prompts, read, beside = tried
        assert all(max(step.counts) <= 1024 and step.wanted == len(step.counts) for step in prompts)
        assert read.wanted == 0
        assert read.counts == prompts[0].counts
        assert beside.wanted == len(beside.counts)
        return [sum(step.counts) for step in prompts]

    assert rows() == [512]
    assert rows(max_batch_tokens=3000) == [512, 1024, 2048, 3000]
    assert rows(max_batch_tokens=8192)[-1] == 8192
    assert rows(800, max_batch_tokens=4096) == [512, 1024, 2048, 4096], "of several prompts"
    assert rows(100, max_batch_tokens=4096, max_requests=3) == [300]
    assert rows(max_batch_tokens=16) == [16]
    assert rows(extend_graphs=False) == [8, 16, 32, 64, 128, 256, 512]
    assert rows(graphs=False) == [8, 16, 32, 64, 128, 256, 512, 64, 128]
    assert rows(graphs=False, max_requests=5) == [8, 16, 32, 64, 128, 256, 512, 10, 10]
    assert rows(graphs=False, max_batch_tokens=100) == [8, 16, 32, 64, 100, 64, 100]
    assert rows(1, graphs=False, max_requests=3) == [3, 3, 3]


def test_first_prompts_have_the_attention_of_short_ones() -> None:
    """Whoever may have but a few of them, of whatever length, has steps of as many rows by the same kernel."""
    for requests, most in ((1, RAGGED_KEYS), (2, 2 * RAGGED_KEYS)):
        settings = Model(path="m", max_batch_tokens=8192, max_requests=requests)
        *_, largest, _, _ = first_steps(settings, 8192)
        assert len(largest.counts) == requests
        assert max(largest.counts) < RAGGED_KEYS
        assert most // 2 < sum(largest.counts) < most


def test_step_ends_a_full_context() -> None:
    batch = TrialStep((1, 1, 3), context=10, page_size=PAGE, wanted=3).batch()
    assert batch.slots.tolist() == [0, 1, 2, 2, 2]
    assert batch.positions.tolist() == [0, 0, 7, 8, 9]
    assert batch.logit_rows.tolist() == [0, 1, 4]
    assert batch.page_table.tolist() == [[0, 1, 2]] * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def load(directory: Path) -> TorchRunner:
    return TorchRunner.load(directory, num_pages=1, page_size=PAGE, context_length=64)


def test_torch_runner_is_exercised_and_its_pool_replaced(directory: Path) -> None:
    runner = load(directory)
    page = ModelConfig.load(directory).kv_bytes_per_token(4) * PAGE
    one = GpuEngine("m", model(), TorchWeights(runner, page), 64, Device())
    claim = one.measure(lambda measured: None)
    assert claim.footprint.kv_bytes_per_token * PAGE == page
    assert runner.num_pages == 1
    opened, kv = one.open(96)
    assert opened is runner
    assert runner.num_pages == kv.capacity_tokens // PAGE == 24
    fresh = TorchRunner.load(directory, num_pages=24, page_size=PAGE, context_length=64)
    batch = TrialStep((1, 1, 1, 20), context=64, page_size=PAGE, wanted=4).batch()
    assert torch.equal(runner.step(batch).logits, fresh.step(batch).logits)


class PooledRows(TorchRows):
    """The reference as a decoder whose pool can be replaced."""

    def __init__(self, runner: TorchRunner) -> None:
        super().__init__(runner)
        self.runner = runner
        self.kv_bytes_per_page = runner.config.kv_bytes_per_token(4) * PAGE

    def allocate_kv(self, num_pages: int) -> None:
        self.runner.allocate_kv(max(num_pages, 1))
        self.num_pages = num_pages


def test_fast_steps_let_go_of_a_pool_before_the_next_one(directory: Path) -> None:
    decoder = PooledRows(load(directory))
    order: list[str] = []

    class Fast:
        def attach(self) -> None:
            order.append(f"attach to {decoder.num_pages}")

        def detach(self) -> None:
            order.append("detach")

    settings = model()
    one = GpuEngine("m", settings, DecoderWeights(decoder, settings, Fast()), 64, Device())
    one.measure(lambda measured: None)
    one.open(96)
    assert order == ["detach", "attach to 16", "detach", "detach", "attach to 24"]


def test_device_runner_is_exercised_and_made_anew_for_its_pool(directory: Path) -> None:
    decoder = PooledRows(load(directory))
    settings = model(depth=3)
    one = GpuEngine("m", settings, DecoderWeights(decoder, settings), 64, Device())
    seen: list[ModelRunner] = []
    one.measure(seen.append)
    assert isinstance(seen[0], DeviceRunner)
    assert seen[0].in_flight == 0
    assert decoder.num_pages == 0
    runner, kv = one.open(96)
    assert isinstance(runner, DeviceRunner)
    assert runner is not seen[0]
    assert (runner.depth, runner.num_pages, kv.capacity_tokens) == (3, 24, 96)
    one.capture(runner)
    batch = TrialStep((1, 2), context=64, page_size=PAGE, wanted=2).batch()
    batch.page_table = np.resize(batch.page_table, kv.page_table.shape)
    assert runner.step(batch).logits.shape[0] == 2


def test_every_route_decides_some_rows_and_many_before_anybody_waits(directory: Path) -> None:
    decoder = PooledRows(load(directory))
    settings = Model(path="m", device="cuda:1", page_size=PAGE, max_batch_tokens=80, max_requests=70)
    one = GpuEngine("m", settings, DecoderWeights(decoder, settings), 64, Device())
    asked: dict[str, list[int]] = {"a": [], "b": []}

    def route(name: str) -> DeviceRoute:
        def decide(rows: RoutedRows) -> torch.Tensor:
            asked[name].append(len(rows.tokens))
            assert (rows.params["p"] == 1).all()
            return torch.zeros_like(rows.tokens)

        return DeviceRoute(name, decide, ("p",))

    def prepare(runner: ModelRunner) -> None:
        assert isinstance(runner, DeviceRunner)
        assert runner.set_routes([route("a"), route("b")]) == (True, True)
        assert runner.routes == 2
        asked.update(a=[], b=[])

    one.measure(prepare)
    assert asked == {"a": [8, 16, 1, 70], "b": [8, 16, 1, 70]}


@pytest.mark.parametrize(
    ("wanted", "routes", "runs"), [(8, 0, 1), (8, 3, 1), (8, 8, 1), (8, 9, 2), (1, 3, 3), (0, 3, 1)]
)
def test_a_step_runs_until_every_route_has_had_a_row(wanted: int, routes: int, runs: int) -> None:
    """Of a model of one request, or of more routes than a step has prompts, too."""
    rounds = list(TrialStep((1,) * max(wanted, 1), context=1, page_size=PAGE, wanted=wanted).rounds(routes))
    assert len(rounds) == runs
    assert {setup.route for setups in rounds for setup in setups} >= set(range(routes if wanted else 0))
    assert all(setup.routable == (routes > 0) for setups in rounds for setup in setups)


def test_a_limit_that_breaks_products_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_qwen3(tmp_path)
    model, shape = Model(path=str(directory), device="cuda", sm_percent=79), load_shape(directory)
    monkeypatch.setattr(products, "wrong_product", lambda *_: "8 x 32 by 32 x 64")
    with pytest.raises(ModelError, match=r"^models\.large\.sm_percent: on 79 % .*8 x 32 by 32 x 64"):
        engine_module._check_products("large", model, shape, torch.device("cuda"))
    free = msgspec.structs.replace(model, sm_percent=0)
    engine_module._check_products("large", free, shape, torch.device("cuda"))
