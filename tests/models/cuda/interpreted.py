"""Kernels and decoder against torch, on the CPU through Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py"

from models.config import ModelConfig
from models.cuda.decoder import CudaDecoder
from models.cuda.decoder_weights import MatrixKind
from models.cuda.heads import HeadShape
from models.cuda.kernels.attention_tasks import MOST_SORTED, TaskList, list_tasks
from models.cuda.kernels.paged_attention import AttentionScratch, paged_attention
from models.cuda.kernels.rms_norm import rms_norm
from models.cuda.kernels.rotate_store import rotate_store
from models.cuda.kernels.silu_mul import silu_mul
from models.cuda.shard import Shard
from models.cuda.tiles import TileShape, choose_tiles
from models.decoder import rms_norm as reference_norm
from models.decoder import silu
from models.rope import rotary_table, rotate
from models.torch_runner import TorchRunner
from tests.models.cuda import stage
from tests.models.cuda.stage import Inactive, Run
from tests.models.tiny import tiny_model

PAGE = 4
CONTEXT = 128
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3-untied": {"family": "qwen3", "tied": False, "vocab": 301},
    "qwen2-yarn": {
        "family": "qwen2",
        "rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "llama-biased": {"family": "llama", "hidden": 40, "mlp_bias": True, "attention_bias": True},
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_close(value: torch.Tensor, expected: torch.Tensor) -> None:
    """To rounding; the interpreter truncates to bfloat16, where a device rounds: two or three times in a kernel."""
    assert value.dtype == expected.dtype
    rounding = 1e-6 if value.dtype == torch.float32 else 3 * 2**-7
    assert ((value.float() - expected.float()).abs() <= rounding * expected.float().abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 64])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, delta, weight = (normal(5, width, seed=seed, dtype=dtype) for seed in range(3))
    out = torch.empty_like(x)
    rms_norm(x, weight[0], 1e-6, out)
    assert_close(out, reference_norm(x, weight[0], 1e-6))

    total = x + delta
    stream = x.clone()
    rms_norm(stream, weight[0], 1e-6, out, delta=delta, keep=stream)
    assert_close(stream, total)
    assert_close(out, reference_norm(total, weight[0], 1e-6))

    picked, kept = torch.empty_like(x[:3]), torch.empty_like(x[:3])
    rms_norm(x, weight[0], 1e-6, picked, delta=delta, index=ids(4, -9, 77), keep=kept)
    assert torch.equal(kept, stream[[4, 0, 4]])
    assert torch.equal(picked, out[[4, 0, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * 1100, dtype=dtype) * 4
    gate_up[0, 0] = -80.0
    out = torch.empty((3, 1100), dtype=dtype)
    silu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(out, silu(gate) * up)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_rotate_store(heads: int, kv_heads: int, norm: bool) -> None:
    shape = HeadShape(heads, kv_heads, head_dim=16, page_size=PAGE, eps=1e-5)
    config = _Rope.config()
    positions, slots, table = ids(0, 9, -1, 31), ids(1, 0, 0, 1), ids(*range(16)).view(2, 8).flip(1).contiguous()
    qkv, norms = normal(4, (heads + 2 * kv_heads) * 16), normal(2, 16, seed=1)
    keys, values = (torch.full((16, kv_heads, PAGE, 16), 7.0) for _ in range(2))
    q, k, v = qkv.clone().view(4, -1, 16).split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        q, k = reference_norm(q, norms[0], 1e-5), reference_norm(k, norms[1], 1e-5)
    full = rotary_table(config, 16, 64, torch.float32)
    cos, sin = full[positions.clamp(min=0).long()].unbind(1)
    rotations = full[:, :, 0, 8:].contiguous()
    before = qkv.clone()
    rotate_store(qkv, norms if norm else None, rotations, positions, slots, table, keys, values, shape)

    active = [0, 1, 3]
    turned = qkv.view(4, -1, 16)[:, :heads]
    assert (turned[active] - rotate(q, cos, sin)[active]).abs().max() < 1e-6
    assert torch.equal(qkv[2], before[2])
    expected_keys, expected_values = torch.full_like(keys, 7.0), torch.full_like(values, 7.0)
    for row in active:
        page = table[slots[row], positions[row] // PAGE]
        expected_keys[page, :, positions[row] % PAGE] = rotate(k, cos, sin)[row]
        expected_values[page, :, positions[row] % PAGE] = v[row]
    assert (keys - expected_keys).abs().max() < 1e-6
    assert torch.equal(values, expected_values)


class _Rope:
    @staticmethod
    def config() -> Any:
        from models.config import RopeConfig

        return RopeConfig("default", 10_000.0)


def cut(query_rows: int = 16, tasks: int = 4, whole_blocks: bool = False) -> TileShape:
    return TileShape(query_rows, keys=16, least_keys=16, tasks=tasks, whole_blocks=whole_blocks, warps=4, stages=2)


def listed(positions: torch.Tensor, leaders: torch.Tensor, shape: TileShape, runs: int = 99) -> TaskList:
    counts = torch.bincount(leaders, minlength=len(leaders)).int()
    slots = torch.arange(len(leaders)).int() + 5
    return list_tasks(positions, leaders, counts, slots, runs=runs, group=4, kv_heads=2, shape=shape)


def in_use(tasks: TaskList) -> list[list[int]]:
    return [record for record in tasks.tasks.tolist() if record[3] < record[4]]


def by_tile(records: list[list[int]]) -> list[list[list[int]]]:
    return [list(tile) for _, tile in itertools.groupby(records, key=lambda record: record[:2])]


def test_every_key_of_every_tile_is_in_one_task() -> None:
    positions, leaders = ids(40, -1, 7, 8, 9, 10, 11, 100, -1, -1), ids(0, 1, 2, 2, 2, 2, 2, 7, 8, 8)
    tasks = listed(positions, leaders, cut())
    # Tiles of 4 rows: 41 keys, 11 and 12 keys of one run, 101 keys. 165 keys over 4: 48 a task.
    expected = [[7, 1, 12, 0, 48, 3, 0, 0], [7, 1, 12, 48, 96, 3, 1, 0], [7, 1, 12, 96, 101, 3, 2, 0]]
    expected += [[0, 1, 5, 0, 41, 1], [6, 1, 11, 0, 12, 1], [2, 4, 7, 0, 11, 1]]
    found = in_use(tasks)
    assert [record[: len(want)] for record, want in zip(found, expected, strict=True)] == expected
    assert tasks.tasks.tolist()[: len(found)] == found
    assert (tasks.tasks[len(found) :, 3:5] == 0).all()
    assert tasks.tickets.shape == (8, 2)
    assert not tasks.tickets.any()
    assert in_use(listed(ids(-1, -1), ids(0, 1), cut())) == []


@pytest.mark.parametrize(("seed", "most"), [(0, 20), (1, 20), (2, 20), (3, 20), (4, 100)])
def test_tasks_fit_whatever_the_runs_are(seed: int, most: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(most // 20, most, int(generator.integers(1, 8)))
    counts[0] = most
    starts = generator.integers(0, int(generator.choice([2, 50, 3000])), len(counts))
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(starts, counts) + np.arange(counts.sum()) - firsts
    shape = cut(tasks=int(generator.integers(1, 9)))
    tasks = listed(ids(*positions), ids(*firsts), shape, runs=len(counts))
    tiles = {
        (first + row, min(4, count - row))
        for first, count in zip(np.cumsum(counts) - counts, counts, strict=True)
        for row in range(0, count, 4)
    }
    keys: dict[tuple[int, int], int] = {}
    cells = []
    for leading, height, slot, begin, end, parts, own, first in in_use(tasks):
        assert slot == leading + 5
        assert begin == keys.get((leading, height), 0)
        keys[leading, height] = end
        cells += [own] if parts > 1 else []
        assert parts == 1 or first <= own < first + parts
    if len(positions) <= MOST_SORTED:
        blocks = [max(-(-(record[4] - record[3]) // shape.keys) for record in tile) for tile in by_tile(in_use(tasks))]
        assert blocks == sorted(blocks, reverse=True)
    assert keys == {(leading, height): positions[leading + height - 1] + 1 for leading, height in tiles}
    assert sorted(cells) == list(range(len(cells)))
    assert len(cells) <= tasks.cells


@pytest.mark.parametrize("tiles", [cut(), cut(tasks=12), cut(32, tasks=1), cut(whole_blocks=True)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 1)])
def test_attention_over_runs_of_all_lengths(heads: int, kv_heads: int, tiles: TileShape) -> None:
    shape = HeadShape(heads, kv_heads, head_dim=16, page_size=PAGE, eps=0.0)
    check_attention(shape, tiles, [(0, 63, [0]), (1, 0, [0]), (2, 5, [0] * 3), (3, 14, [0] * 17), (4, 40, [0] * 2)])


@pytest.mark.parametrize(
    ("group", "step", "wanted"),
    [
        (8, (64, 64), (16, 128)),
        (8, (192, 64), (64, 64)),
        (5, (192, 64), (64, 64)),
        (4, (192, 64), (32, 64)),
        (16, (64, 64), (32, 128)),
        (16, (192, 64), (128, 64)),
    ],
)
def test_attention_by_the_cuts_of_small_steps(group: int, step: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Runs of more and of fewer rows than a tile has, keys of none, one and several whole blocks and tasks."""
    shape = HeadShape(group, 1, head_dim=16, page_size=PAGE, eps=0.0)
    tiles = choose_tiles(*step, group=group, kv_heads=1, head_dim=16, dtype=torch.bfloat16, processors=4)
    assert (tiles.query_rows, tiles.keys) == wanted
    rows = tiles.query_rows // group
    runs: list[Run] = [
        (0, 470 - rows, [0] * rows),
        (1, 0, [0]),
        (2, 255, [0]),
        (3, 120, [0] * (2 * rows + 1)),
        (4, 0, [0] * 3),
        (5, 500, [0] * (rows - 1)),
    ]
    tasks = check_attention(shape, tiles, runs, context=512)
    assert {record[5] for record in in_use(tasks)} >= {1, 2}
    assert {record[1] for record in in_use(tasks)} >= {1, rows - 1, rows}


def check_attention(shape: HeadShape, tiles: TileShape, runs: list[Run], context: int = CONTEXT) -> TaskList:
    """Twice the same, and that of torch; the rows' tasks."""
    heads, kv_heads = shape.heads, shape.kv_heads
    table = stage.page_table(len(runs), context, PAGE)
    rows = stage.device_rows(runs, table, "cpu", inactive=Inactive(before=2, after=3))
    pages = table.size
    keys, values = (normal(pages + 1, kv_heads, PAGE, 16, seed=seed) for seed in range(2))
    qkv = normal(len(rows), (heads + 2 * kv_heads) * 16, seed=2)
    outs = []
    for _ in range(2):
        out = torch.full((len(rows), heads * 16), 9.0)
        place = (rows.positions, rows.leaders, rows.counts, rows.slots)
        group = heads // kv_heads
        tasks = list_tasks(*place, runs=len(table), group=group, kv_heads=kv_heads, shape=tiles)
        scratch = AttentionScratch.of(tasks, shape, tiles)
        paged_attention(qkv, keys, values, out, tasks, scratch, rows.positions, rows.page_table, shape, tiles)
        assert not tasks.tickets.any()
        outs.append(out)
    assert torch.equal(*outs)
    for row, (position, slot) in enumerate(zip(rows.positions.tolist(), rows.slots.tolist(), strict=True)):
        if position < 0:
            assert (outs[0][row] == 9.0).all()
            continue
        own = torch.from_numpy(table[slot].astype(np.int64))
        seen = [cache[own].transpose(1, 2).reshape(-1, kv_heads, 16)[: position + 1] for cache in (keys, values)]
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in seen)
        q = qkv[row].view(-1, 16)[:heads]
        weights = (torch.einsum("hd,lhd->hl", q, k) / 4).softmax(-1)
        expected = torch.einsum("hl,lhd->hd", weights, v).flatten()
        assert (outs[0][row] - expected).abs().max() < 2e-6
    return tasks


def pair(directory: Path, **options: Any) -> tuple[TorchRunner, CudaDecoder, np.ndarray]:
    table = stage.page_table(4, CONTEXT, PAGE)
    runner = TorchRunner.load(directory, num_pages=table.size, page_size=PAGE, **options)
    return runner, decoder(directory, table.size, **options), table


def decoder(directory: Path, pages: int, **options: Any) -> CudaDecoder:
    made = CudaDecoder.load(directory, device="cpu", page_size=PAGE, **options)
    made.allocate_kv(pages)
    return made


def tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


STEPS: list[list[Run]] = [
    [(0, 0, tokens(7, 0)), (1, 0, tokens(2, 1))],
    [(2, 0, tokens(3, 2)), (0, 7, tokens(1, 3)), (1, 2, tokens(3, 4))],
    [(1, 5, tokens(1, 5)), (2, 3, tokens(1, 7))],
]


@pytest.mark.parametrize(
    "name", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_decoder_equals_the_reference(tmp_path: Path, name: str) -> None:
    directory = tiny_model(tmp_path, **MODELS[name])
    runner, fast, table = pair(directory, vocab_size=258)
    assert fast.vocab_size == 258
    for number, runs in enumerate(STEPS):
        rows = stage.device_rows(runs, table, "cpu", last_only=number == 1, inactive=Inactive(before=1, after=2))
        output = fast.forward(rows, stage.runs_of(runs) if number == 0 else None)
        expected = runner.step(stage.batch(runs, table, last_only=number == 1))
        assert output.logits.shape == expected.logits.shape
        assert output.logits.dtype == torch.float32
        assert (output.logits - expected.logits).abs().max() < 1e-4
        assert (output.hidden - expected.hidden).abs().max() < 1e-4


def test_inactive_rows_stay_finite_and_write_nothing(tmp_path: Path) -> None:
    fast = decoder(tiny_model(tmp_path, "qwen3", tokenizer=False), 8)
    table = stage.page_table(1, 32, PAGE)
    rows = stage.device_rows([(0, 0, [5])], table, "cpu", inactive=Inactive(after=3))
    rows.positions.fill_(-1)
    rows.logit_rows = ids(0, 3)
    output = fast.forward(rows)
    assert output.logits.isfinite().all()
    assert not fast.k_cache.any()
    assert not fast.v_cache.any()


class Ranks:
    """Two ranks in lockstep: one thread runs at a time, until it has handed in its part of a sum."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.parts: list[torch.Tensor] = []
        self.round = 0

    def meet(self, part: torch.Tensor) -> list[torch.Tensor]:
        """All parts, in the order in which they came."""
        self.parts.append(part)
        parts, own = self.parts, self.round
        if len(parts) == 2:
            self.parts, self.round = [], own + 1
            self.turn.notify_all()
        else:
            assert self.turn.wait_for(lambda: self.round > own, timeout=30)
        return parts

    def shard(self, rank: int) -> Shard:
        def reduce(part: torch.Tensor) -> None:
            mine = part.clone()
            part.copy_(sum(self.meet(mine), torch.zeros_like(mine)))

        def gather(local: torch.Tensor) -> torch.Tensor:
            parts = self.meet(local)
            other = next(part for part in parts if part is not local)
            return torch.cat([local, other] if rank == 0 else [other, local], dim=-1)

        return Shard(rank, 2, reduce, gather)


@pytest.mark.parametrize(
    "name", ["qwen3-untied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "llama-biased"))]
)
def test_two_shards_equal_the_whole(tmp_path: Path, name: str) -> None:
    directory = tiny_model(tmp_path, tokenizer=False, **MODELS[name])
    table = stage.page_table(4, CONTEXT, PAGE)
    whole, ranks = decoder(directory, table.size), Ranks()
    shards = [decoder(directory, table.size, shard=ranks.shard(rank)) for rank in range(2)]
    assert shards[0].k_cache.shape[2] * 2 == whole.k_cache.shape[2]
    assert shards[0].kv_bytes_per_page * 2 == whole.kv_bytes_per_page
    rows = stage.device_rows([(0, 0, tokens(3, 0)), (1, 0, tokens(1, 1))], table, "cpu")
    expected = whole.forward(rows)
    results: dict[int, torch.Tensor] = {}

    def work(rank: int) -> None:
        with ranks.turn:
            results[rank] = shards[rank].forward(rows).logits

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert torch.equal(results[0], results[1])
    assert (results[0] - expected.logits).abs().max() < 1e-4


def matrix(decoder: CudaDecoder, layer: int, kind: MatrixKind) -> torch.Tensor:
    """One of a layer's matrices, which is a part of the stack."""
    found = decoder.weights.layers[layer].matrices[kind]
    assert found.data_ptr() == decoder.weights.stacks[kind][layer].data_ptr()
    return found


def test_dummy_weights_repeat_and_agree_between_ranks(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, "qwen2", tied=False, tokenizer=False)
    (directory / "model.safetensors").unlink()
    whole, again = (decoder(directory, 4, load_format="dummy") for _ in range(2))
    halves = [decoder(directory, 4, load_format="dummy", shard=Shard(rank, 2)) for rank in range(2)]
    down = matrix(whole, 1, "down")
    assert torch.equal(down, matrix(again, 1, "down"))
    assert torch.equal(down, torch.cat([matrix(half, 1, "down") for half in halves], dim=1))
    assert 0.015 < down.std() < 0.025
    assert not torch.equal(down, matrix(whole, 0, "down"))
    assert (whole.weights.layers[0].input_norm == 1).all()
    assert whole.weights.layers[0].biases["qkv"].any()


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, "llama", tied=False, tokenizer=False)
    fast, stored = decoder(directory, 4), load_file(directory / "model.safetensors")
    prefix = "model.layers.1.mlp."
    gate_up = torch.cat([stored[f"{prefix}{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(matrix(fast, 1, "gate_up"), gate_up)
    assert torch.equal(fast.weights.head[:260], stored["lm_head.weight"])
    padding = fast.weights.head[260:].numel() + fast.weights.embedding[260:].numel()
    assert fast.weight_bytes == 4 * (ModelConfig.load(directory).parameters() + padding)
