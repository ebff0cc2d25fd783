"""The megakernel's own source, run by an emulator of the GPU, beside the reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelError
from models.cuda.mega_weights import MegaWeights
from models.cuda.megakernel import GpuLauncher
from tests.models.cuda.emulated import COMPILER, EmulatedLauncher
from tests.models.cuda.mega_cases import PARTS, Pair
from tests.models.tiny import tiny_model

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

# Fewer stages than tiles have chunks, and no multiple of the warps.
FLAGS = (*PARTS, "-DMEGA_STAGES=9")
# Tiles of 8 units whose chunks are one block, 26 of them; tiles of few units, whose chunks are up to five blocks.
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "many chunks": (2, {"family": "qwen3", "hidden": 128, "ffn": 1664}),
    "long chunks": (5, {"family": "qwen2", "hidden": 128, "ffn": 2560, "tied": False}),
    "biases": (3, {"family": "llama", "hidden": 64, "ffn": 832, "mlp_bias": True, "attention_bias": True}),
}


def emulated(weights: MegaWeights) -> EmulatedLauncher:
    return EmulatedLauncher(weights, FLAGS)


def on_gpu(weights: MegaWeights) -> GpuLauncher:
    return GpuLauncher(weights, FLAGS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(COMPILER is None, reason="needs g++")),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.timeout(900),
                pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of compute capability 9.0"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(folder: Path, name: str, device: str) -> Pair:
    grid, shape = SHAPES[name]
    tiny_model(folder, vocab=260, dtype=torch.bfloat16, head_dim=64, kv_heads=2, **shape)
    launcher = emulated if device == "cpu" else on_gpu
    sizes = {"grid": grid, "page_size": 16, "num_pages": 200, "vocab_size": 259, "context_length": 512}
    return Pair(folder, launcher, device=device, **sizes)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, device: str) -> Pair:
    return made(tmp_path_factory.mktemp("mega"), "biases", device)


@pytest.mark.parametrize("name", SHAPES)
def test_steps_equal_the_reference(tmp_path: Path, name: str, device: str) -> None:
    pair = made(tmp_path, name, device)
    chosen = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [chosen.randrange(259) for _ in range(count)]

    steps = [
        [(0, tokens(1)), (1, tokens(3))],
        *([(0, tokens(16))] for _ in range(3)),
        [(1, tokens(9)), (2, tokens(1)), (3, tokens(4))],
        [(slot, tokens(1)) for slot in range(8)],
        [(0, tokens(12)), (5, tokens(2))],
        [(slot, tokens(1)) for slot in range(12)],
        [(0, tokens(1))],
    ]
    for seed, runs in enumerate(steps):
        if isinstance(pair.launcher, EmulatedLauncher):
            pair.launcher.seed = seed
        pair.check(runs, idle=0 if sum(len(part) for _, part in runs) in (8, 16) else 2)


# Query heads of a KV head, KV heads, SMs; contexts and new rows: whole rounds of tiles and others, more tiles than an SM plans
# ahead, one to four groups of query rows, several turns.
LONG: list[tuple[int, int, int, list[tuple[int, int]]]] = [
    (2, 2, 5, [(255, 1), (256, 1), (257, 1), (2060, 1)]),
    (8, 1, 2, [(6000, 3), (0, 1), (130, 5)]),
    (8, 2, 7, [(2060, 10), (600, 1), (16, 2)]),
]


@pytest.mark.parametrize(("group", "kv_heads", "grid", "runs"), LONG)
def test_long_contexts_as_they_are_served(
    tmp_path: Path, device: str, group: int, kv_heads: int, grid: int, runs: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    shape = {"family": "qwen3", "hidden": 64, "ffn": 64, "heads": group * kv_heads, "context": 6100}
    tiny_model(tmp_path, vocab=260, dtype=torch.bfloat16, head_dim=64, kv_heads=kv_heads, **shape)
    launcher = EmulatedLauncher if device == "cpu" else GpuLauncher
    pair = Pair(tmp_path, launcher, grid=grid, num_pages=600, vocab_size=259, context_length=6100, device=device)
    for slot, (context, _) in enumerate(runs):
        pair.fill(slot, context)
    pair.check([(slot, list(range(rows))) for slot, (_, rows) in enumerate(runs)])
    # The tokens before lie in pages that steps have written.
    pair.check([(slot, [slot]) for slot in range(len(runs))], idle=1)


def test_a_step_of_inactive_rows_leaves_everything_as_it_is(pair: Pair) -> None:
    pair.check([(40, [1, 2, 3])])
    batch = pair.batch([(40, [4]), (41, [5])])
    for slot in (40, 41):
        pair.lengths[slot] -= 1
    rows = pair.rows(batch, idle=1)
    rows.positions.fill_(-1)
    before = pair.k_cache.clone(), pair.v_cache.clone()
    output = pair.kernel.forward(rows)
    assert torch.equal(output.logits.cpu(), torch.zeros(3, 259))
    assert torch.equal(output.hidden, torch.zeros_like(output.hidden))
    for cache, old in zip((pair.k_cache, pair.v_cache), before, strict=True):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))
    pair.check([(40, [4]), (41, [5])], idle=1)


def test_pages_that_cut_a_tile_of_keys_are_refused(pair: Pair) -> None:
    kernel = pair.kernel
    cache = torch.zeros(2, 4, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="multiple of 16"):
        type(kernel)(
            kernel.weights, k_cache=cache, v_cache=cache, rotations=torch.zeros(8, 2, 32), launcher=pair.launcher
        )
