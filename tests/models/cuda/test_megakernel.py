"""The megakernel's own source, run by an emulator of the GPU, beside the reference."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from models.config import ModelError
from models.cuda.mega_weights import MegaWeights
from models.cuda.megakernel import GpuLauncher
from tests.models.cuda.emulated import COMPILER, EmulatedLauncher
from tests.models.cuda.mega_cases import Pair
from tests.models.tiny import tiny_model

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

# Parts of 16 keys, so that short contexts are split as well; fewer stages than a tile has chunks, and no multiple of the warps.
FLAGS = ("-DMEGA_PART_SHIFT=4", "-DMEGA_TASK_COST=0", "-DMEGA_MERGE_COST=0", "-DMEGA_STAGES=9")


def emulated(weights: MegaWeights) -> EmulatedLauncher:
    return EmulatedLauncher(weights, FLAGS)


def on_gpu(weights: MegaWeights) -> GpuLauncher:
    return GpuLauncher(weights, FLAGS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(COMPILER is None, reason="needs g++")),
        pytest.param("cuda", marks=pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of compute capability 9.0")),
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory: Path = tmp_path_factory.mktemp("mega")
    tiny_model(directory, "qwen3", vocab=260, dtype=torch.bfloat16, hidden=64, head_dim=64, kv_heads=2, ffn=832)
    launcher = emulated if request.param == "cpu" else on_gpu
    sizes = {"grid": 3, "page_size": 16, "num_pages": 200, "vocab_size": 259, "context_length": 512}
    return Pair(directory, launcher, device=request.param, **sizes)


def test_steps_equal_the_reference(pair: Pair) -> None:
    chosen = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [chosen.randrange(259) for _ in range(count)]

    steps = [
        [(0, tokens(1)), (1, tokens(3))],
        [(0, tokens(60))],
        [(1, tokens(17)), (2, tokens(1)), (3, tokens(30))],
        [(slot, tokens(1)) for slot in range(8)],
        [(0, tokens(40)), (5, tokens(2))],
        [(0, tokens(1))],
    ]
    for seed, runs in enumerate(steps):
        if isinstance(pair.launcher, EmulatedLauncher):
            pair.launcher.seed = seed
        pair.check(runs, idle=0 if len(runs) == 8 else 2)


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
