"""The CUDA decoder against the reference runner, on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.batch import StepOutput
from models.cuda.decoder import RAGGED_ROWS, CudaDecoder
from models.cuda.ragged_prefill import DOCUMENTED_BYTES, flashinfer_present
from models.rows import Rows
from models.torch_runner import TorchRunner
from tests.models.cuda import stage
from tests.models.cuda.splitting import fullest, planned
from tests.models.cuda.stage import Inactive, Run
from tests.models.test_torch_runner import MODELS
from tests.models.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

PAGE = 16
SLOTS = 6
WIDE = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 384}
WIDER = {"hidden": 256, "heads": 16, "kv_heads": 2, "head_dim": 128, "ffn": 384}


@dataclass
class Pair:
    """A reference on the CPU and a decoder on the device that are fed the same steps."""

    runner: TorchRunner
    fast: CudaDecoder
    table: np.ndarray
    ids: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, context: int = 512, dtype: str = "float32", place: str = "cpu") -> Pair:
        table = stage.page_table(SLOTS, context, PAGE)
        pages = table.size
        runner = TorchRunner.load(directory, num_pages=pages, page_size=PAGE, dtype=dtype, device=place)
        fast = CudaDecoder.load(directory, dtype=dtype, page_size=PAGE)
        fast.allocate_kv(pages)
        return cls(runner, fast, table)

    def runs(self, counts: dict[int, int], generator: np.random.Generator) -> list[Run]:
        """`counts[slot]` random ids more for each slot."""
        runs = []
        for slot, count in counts.items():
            tokens = [int(token) for token in generator.integers(0, 256, count)]
            held = self.ids.setdefault(slot, [])
            runs.append((slot, len(held), tokens))
            held.extend(tokens)
        return runs

    def both(self, runs: list[Run], *, host: bool = True, inactive: Inactive | None = None) -> tuple[StepOutput, ...]:
        rows = stage.device_rows(runs, self.table, "cuda", inactive=inactive)
        output = self.fast.forward(rows, stage.runs_of(runs) if host else None)
        return output, self.runner.step(stage.batch(runs, self.table))


def difference(output: StepOutput, expected: StepOutput) -> float:
    """Largest difference of the logits, relative to the largest logit."""
    want = expected.logits.float().cpu()
    return float((output.logits.cpu() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_float32_writes_the_same_greedy_text(tmp_path: Path, name: str) -> None:
    """Prompts in chunks, then 128 tokens of 4 requests, one of which extends by several at a time."""
    pair = Pair.of(tiny_model(tmp_path, **MODELS[name]))
    generator = np.random.default_rng(0)
    for counts in ({0: 33, 1: 5}, {2: 70, 0: 1, 1: 17}, {3: 16, 0: 4}):
        output, expected = pair.both(pair.runs(counts, generator))
        assert difference(output, expected) < 1e-4
    last = dict.fromkeys(range(4), 0)
    written = []
    for step in range(128):
        runs: list[Run] = []
        for slot, token in last.items():
            count = 1 + step % 3 if slot == 2 else 1
            held = pair.ids[slot]
            runs.append((slot, len(held), [token] * count))
            held.extend([token] * count)
        output, expected = pair.both(runs, host=False, inactive=Inactive(step % 2, step % 5))
        assert difference(output, expected) < 1e-4
        ids = expected.logits.argmax(-1)
        assert output.logits.argmax(-1).cpu().tolist() == ids.tolist()
        ends = np.cumsum([len(tokens) for _, _, tokens in runs]) - 1
        last = {slot: int(ids[end]) for (slot, _, _), end in zip(runs, ends, strict=True)}
        written += last.values()
    assert len(set(written)) > 10


@pytest.mark.parametrize("shape", [{}, WIDE, WIDER])
@pytest.mark.parametrize("seed", range(2))
def test_float32_equals_on_random_mixes_of_runs(tmp_path: Path, shape: dict[str, int], seed: int) -> None:
    pair = Pair.of(tiny_model(tmp_path, "qwen3", context=2048, **shape), 2048)
    generator = np.random.default_rng(seed)
    for step in range(12):
        slots = generator.permutation(SLOTS)[: int(generator.integers(1, SLOTS + 1))]
        longest = int(generator.choice([1, 4, 20, 150]))
        runs = pair.runs({int(slot): int(generator.integers(1, longest + 1)) for slot in slots}, generator)
        output, expected = pair.both(runs, host=bool(step % 2), inactive=Inactive(after=step % 4))
        assert difference(output, expected) < 1e-4


@pytest.mark.parametrize("shape", [{}, WIDER])
def test_float32_equals_over_8192_tokens(tmp_path: Path, shape: dict[str, int]) -> None:
    """Prefill in chunks of uneven sizes, then decode and extends over page borders, next to short requests."""
    pair = Pair.of(tiny_model(tmp_path, "qwen3", layers=1, context=8192, **shape), 8192)
    generator = np.random.default_rng(0)
    for counts in ({0: 3000}, {0: 4096, 1: 250}, {0: 1079, 1: 1}, {0: 1, 1: 1, 2: 1}, {0: 5, 1: 4}, {0: 11, 2: 30}):
        output, expected = pair.both(pair.runs(counts, generator))
        assert difference(output, expected) < 1e-4
    assert len(pair.ids[0]) == 8192


@pytest.mark.parametrize(("family", "shape"), [("qwen3", WIDE), ("qwen2", WIDER), ("llama", WIDE | {"kv_heads": 8})])
def test_bfloat16_is_as_close_to_float32_as_the_reference(tmp_path: Path, family: str, shape: dict[str, int]) -> None:
    directory = tiny_model(tmp_path, family, dtype=torch.bfloat16, context=1024, **shape)
    half, full = Pair.of(directory, 1024, "bfloat16", "cuda"), Pair.of(directory, 1024)
    generator = np.random.default_rng(0)
    agreed, ours, theirs = [], [], []
    for counts in ({0: 300, 1: 40}, {2: 130, 0: 1, 1: 9}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 4, 1: 3, 2: 16}):
        runs = half.runs(counts, generator)
        output, reference = half.both(runs)
        exact = full.runner.step(stage.batch(runs, half.table))
        ours.append(difference(output, exact))
        theirs.append(difference(reference, exact))
        agreed += (output.logits.argmax(-1).cpu() == exact.logits.argmax(-1)).tolist()
    assert np.mean(ours) < 1.25 * np.mean(theirs) + 1e-3
    assert np.mean(agreed) > 0.95


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_repeat_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    pair = Pair.of(tiny_model(tmp_path, "qwen3", context=4096, **WIDER), 4096, dtype)
    generator = np.random.default_rng(0)
    pair.fast.forward(stage.device_rows(pair.runs({0: 3900, 1: 700, 2: 90}, generator), pair.table, "cuda"))
    rows = stage.device_rows(pair.runs({0: 1, 1: 4, 2: 20}, generator), pair.table, "cuda")
    first = pair.fast.forward(rows)
    for _ in range(20):
        again = pair.fast.forward(rows)
        assert torch.equal(again.logits, first.logits)
        assert torch.equal(again.hidden, first.hidden)


@dataclass
class Captured:
    """A step in a CUDA graph; its rows are overwritten from step to step."""

    graph: torch.cuda.CUDAGraph
    rows: Rows
    output: StepOutput

    @classmethod
    def of(cls, forward: Callable[[Rows], StepOutput], rows: Rows) -> Captured:
        forward(rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = forward(rows)
        return cls(graph, rows, output)

    def replay(self, rows: Rows) -> StepOutput:
        for name in ("tokens", "positions", "slots", "leaders", "counts", "page_table", "logit_rows"):
            getattr(self.rows, name).copy_(getattr(rows, name))
        self.graph.replay()
        return StepOutput(self.output.logits.clone(), self.output.hidden.clone())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_equals_the_eager_one(tmp_path: Path, dtype: str) -> None:
    """One graph of 12 rows: first 12 rows of one run, then decode, extends and padding; contexts short and long."""
    pair = Pair.of(tiny_model(tmp_path, "qwen3", context=4096, **WIDER), 4096, dtype)
    generator = np.random.default_rng(0)
    first = stage.device_rows(pair.runs({0: 12}, generator), pair.table, "cuda")
    captured = Captured.of(pair.fast.forward, first)
    pair.fast.forward(stage.device_rows(pair.runs({1: 3000, 2: 600}, generator), pair.table, "cuda"))
    for counts, idle in (({0: 1, 1: 1, 2: 1}, 9), ({0: 3, 1: 4, 2: 5}, 0), ({1: 10}, 2), ({0: 12}, 0)):
        runs = pair.runs(counts, generator)
        rows = stage.device_rows(runs, pair.table, "cuda", inactive=Inactive(after=idle))
        last = torch.tensor([11] * (12 - len(rows.logit_rows)), dtype=torch.int32, device="cuda")
        rows.logit_rows = torch.cat([rows.logit_rows, last])
        replayed, eager = captured.replay(rows), pair.fast.forward(rows)
        assert torch.equal(replayed.logits, eager.logits)
        assert torch.equal(replayed.hidden, eager.hidden)
        assert replayed.logits.isfinite().all()


@pytest.mark.parametrize("shape", [WIDER, WIDER | {"kv_heads": 8}])
def test_a_captured_prefill_equals_the_reference(tmp_path: Path, shape: dict[str, int]) -> None:
    """One graph of 320 rows: whole chunks of one prompt, several prompts with decode rows between them, padding."""
    directory = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, context=4096, layers=2, **shape)
    pair = Pair.of(directory, 4096, "bfloat16", "cuda")
    generator = np.random.default_rng(0)
    first = stage.device_rows(pair.runs({0: 320}, generator), pair.table, "cuda")
    captured = Captured.of(pair.fast.forward, first)
    pair.runner.step(stage.batch([(0, 0, pair.ids[0])], pair.table))
    pair.both(pair.runs({1: 3000, 2: 600}, generator), host=False)
    mixes: list[dict[int, int]] = [{1: 310, 2: 1}, {0: 1, 3: 100, 2: 3, 4: 150, 1: 1}, {5: 1}, {1: 200}, {0: 320}]
    for counts in mixes:
        runs = pair.runs(counts, generator)
        idle = 320 - sum(counts.values())
        rows = stage.device_rows(runs, pair.table, "cuda", inactive=Inactive(after=idle))
        padding = torch.full((320 - len(rows.logit_rows),), 319, dtype=torch.int32, device="cuda")
        rows.logit_rows = torch.cat([rows.logit_rows, padding])
        replayed, eager = captured.replay(rows), pair.fast.forward(rows)
        assert torch.equal(replayed.logits, eager.logits)
        expected = pair.runner.step(stage.batch(runs, pair.table))
        count = len(expected.logits)
        assert difference(StepOutput(replayed.logits[:count], replayed.hidden[:count]), expected) < 0.02
        assert replayed.logits.isfinite().all()


@pytest.mark.parametrize("rows", [1, 64, 200])
def test_overlapping_launches_change_nothing(tmp_path: Path, rows: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    directory = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, context=1024, layers=12, **WIDER)
    fast = CudaDecoder.load(directory, page_size=PAGE)
    fast.allocate_kv(64)
    table = stage.page_table(1, 1024, PAGE)
    start = stage.device_rows([(0, 0, [5] * 300)], table, "cuda")
    step = stage.device_rows([(0, 300, list(range(rows)))], table, "cuda")
    fast.forward(start)
    plain = fast.forward(step)
    fast.overlap = True
    for _ in range(10):
        again = fast.forward(step)
        assert torch.equal(again.logits, plain.logits)
    captured = Captured.of(fast.forward, step)
    for _ in range(10):
        assert torch.equal(captured.replay(step).logits, plain.logits)


def test_inactive_rows_write_nothing(tmp_path: Path) -> None:
    fast = CudaDecoder.load(tiny_model(tmp_path, "qwen3"), page_size=PAGE, dtype="bfloat16")
    fast.allocate_kv(8)
    rows = stage.device_rows([(0, 0, [1, 2])], stage.page_table(1, 64, PAGE), "cuda", inactive=Inactive(2, 3))
    rows.positions.fill_(-1)
    output = fast.forward(rows)
    assert output.logits.isfinite().all()
    assert not fast.k_cache.any()
    assert not fast.v_cache.any()


@pytest.mark.skipif(not flashinfer_present(), reason="needs flashinfer")
def test_flashinfer_equals_the_tiled_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = WIDER | {"kv_heads": 8}
    directory = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, context=4096, **shape)
    ragged, tiled = (Pair.of(directory, 4096, "bfloat16", "cuda") for _ in range(2))
    monkeypatch.setattr(tiled.fast, "_has_ragged", lambda: False)
    monkeypatch.setattr("models.cuda.decoder.RAGGED_KEYS", 0)
    generator = np.random.default_rng(0)
    for counts in ({0: 900, 1: RAGGED_ROWS}, {2: 70, 0: 1, 1: 9}, {0: 2000}, {0: 500, 1: 1, 2: 300}):
        runs = ragged.runs(counts, generator)
        known = stage.runs_of(runs)
        outputs = [pair.fast.forward(stage.device_rows(runs, pair.table, "cuda"), known) for pair in (ragged, tiled)]
        assert difference(*outputs) < 0.02
    assert ragged.fast._ragged is not None
    assert tiled.fast._ragged is None


@pytest.mark.skipif(not flashinfer_present(), reason="needs flashinfer")
def test_flashinfer_splits_keys_beyond_the_documented_workspace(tmp_path: Path) -> None:
    """The heads of Qwen3-32B; two long runs are split into as many tiles as the GPU has room for."""
    context, processors = 4096, torch.cuda.get_device_properties("cuda").multi_processor_count
    shape = WIDER | {"heads": 64, "kv_heads": 8}
    directory = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, context=context, layers=1, **shape)
    fast = CudaDecoder.load(directory, page_size=PAGE)
    lengths = fullest(fast.shape, processors, context)
    expected = planned(lengths, fast.shape, processors)
    if expected.taken <= DOCUMENTED_BYTES:
        pytest.skip(f"{processors} multiprocessors need no more")
    table, generator = stage.page_table(2, context, PAGE), np.random.default_rng(0)
    fast.allocate_kv(table.size)
    before, runs = [
        [(slot, start, generator.integers(0, 256, end - start).tolist()) for slot, (start, end) in enumerate(spans)]
        for spans in ([(0, end - rows) for rows, end in lengths], [(end - rows, end) for rows, end in lengths])
    ]
    fast.forward(stage.device_rows(before, table, "cuda", last_only=True))
    rows = stage.device_rows(runs, table, "cuda")
    tiled, ragged = fast.forward(rows), fast.forward(rows, stage.runs_of(runs))
    assert fast._ragged is not None
    plan = [int(word) for word in fast._ragged._plans[-1][0]._plan_info]
    assert (bool(plan[14]), plan[0], plan[3]) == (expected.split, expected.tiles, expected.rows)
    assert difference(ragged, tiled) < 0.02
