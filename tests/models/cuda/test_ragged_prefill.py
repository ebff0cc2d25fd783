"""The workspace of FlashInfer's prefill, against its plans; no device is needed to know them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from models.cuda.decoder import RAGGED_KEYS, RAGGED_ROWS
from models.cuda.heads import HeadShape
from models.cuda.ragged_prefill import DOCUMENTED_BYTES, workspace_bytes
from tests.models.cuda.splitting import fullest, planned
from trouterd.config import Model
from trouterd.worker.trial_step import TrialStep, first_steps, largest_steps

H200 = 132


def heads(query: int, kv: int, head_dim: int = 128, page_size: int = 16) -> HeadShape:
    return HeadShape(heads=query, kv_heads=kv, head_dim=head_dim, page_size=page_size, eps=1e-6)


def test_qwen3_32b_takes_more_than_is_documented() -> None:
    """On an H200: values of 138,412,032 bytes, which FlashInfer asked for in vain, and scales."""
    assert workspace_bytes(heads(64, 8), H200) == 138_412_032 + 64 * 33 * 128 * 4


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_have_tiles_for_their_own_heads(world: int) -> None:
    """Fewer heads, among which as many tiles are dealt out."""
    tiles = 2 * H200 * world // 8
    assert workspace_bytes(heads(64 // world, 8 // world), H200) == 64 // world * tiles * 128 * 129 * 4


def test_fewer_multiprocessors_or_heads_leave_what_is_documented() -> None:
    for shape, processors in ((heads(64, 8), 52), (heads(16, 8), H200), (heads(40, 8), H200), (heads(2048, 1024), 66)):
        assert workspace_bytes(shape, processors) == DOCUMENTED_BYTES


LARGE = [
    (heads(64, 8), H200),
    (heads(32, 4, page_size=1), H200),
    (heads(8, 1, page_size=64), H200),
    (heads(96, 8), 148),
    (heads(64, 4, head_dim=64), 142),
    (heads(128, 8, head_dim=256), H200),
]


@pytest.mark.parametrize(("shape", "processors"), LARGE)
def test_plans_reach_it(shape: HeadShape, processors: int) -> None:
    plan = planned(fullest(shape, processors, 8192), shape, processors)
    assert plan.split
    assert plan.tiles == 2 * processors // shape.kv_heads
    assert plan.taken == workspace_bytes(shape, processors) > DOCUMENTED_BYTES


@pytest.mark.parametrize(("shape", "processors"), LARGE)
def test_no_plan_exceeds_it(shape: HeadShape, processors: int) -> None:
    """Nor any of fewer multiprocessors, down to fewer than it takes to split anything.

    The oracle retells FlashInfer's plan; that it is what FlashInfer does is seen on a GPU alone (`test_decoder.py`).
    """
    chance, limit, taken = random.Random(1), workspace_bytes(shape, processors), []
    for trial in range(3000):
        runs = []
        for _ in range(chance.choice((1, 2, 3, 8, 40))):
            rows = chance.randint(1, chance.choice((1, 4, 16, 64, 256, 2048)))
            runs.append((rows, rows + chance.randint(0, chance.choice((1, 500, 8000, 100_000)))))
        plan = planned(runs, shape, processors if trial % 4 else chance.randint(1, processors))
        assert plan.taken <= limit
        taken.append(plan.taken)
    assert max(taken) > 0.9 * limit
    assert taken.count(0) > 300


@pytest.mark.parametrize("rows", [RAGGED_ROWS, 79, 512, 8192])
def test_the_start_plans_before_memory_is_dealt_out(rows: int) -> None:
    """Whoever may have a long run has one among the steps that are measured: the workspace is set aside."""

    def has(steps: Iterable[TrialStep]) -> bool:
        return any(step.context >= RAGGED_KEYS and step.counts[-1] >= RAGGED_ROWS for step in steps)

    model = Model(path="m", max_batch_tokens=rows)
    assert has(largest_steps(model, RAGGED_KEYS))
    # Of fewer rows every step has a graph from then on, if any has, and those are not planned.
    assert has(first_steps(model, RAGGED_KEYS)) or rows < 79
