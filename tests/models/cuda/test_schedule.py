"""Attention's work list of the megakernel, mega/schedule.cuh, made by an emulated warp: what has to hold for every step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.cuda.mega_params import Params
from models.cuda.megakernel import KEY_TILE, MAX_ROWS
from models.cuda.shares import WARPS
from tests.models.cuda.emulated import COMPILER, EmulatedLauncher, Task
from tests.models.cuda.mega_cases import PARTS, Pair
from tests.models.tiny import tiny_llama

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SMS = 132
LONGEST = 100_000
QUERY_BLOCK = 64
MERGED_AT_ONCE = 4
FLAGS: list[tuple[str, ...]] = [(), PARTS]


@dataclass(frozen=True)
class Step:
    """Runs as (rows, position of the first or None where inactive), query heads of a KV head, KV heads, SMs, room for parts."""

    runs: tuple[tuple[int, int | None], ...]
    group: int
    kv_heads: int
    grid: int
    split_tasks: int = 4 * SMS

    def active(self) -> list[tuple[int, int, int]]:
        """First row, rows and position of each active run."""
        found, first = [], 0
        for count, start in self.runs:
            if start is not None:
                found.append((first, count, start))
            first += count
        return found


@st.composite
def steps(draw: st.DrawFn) -> Step:
    starts = st.none() | st.integers(0, LONGEST) | st.integers(0, 300)
    lengths = st.just(1) | st.integers(1, MAX_ROWS)
    runs, left = [], MAX_ROWS
    for count, start in draw(st.lists(st.tuples(lengths, starts), min_size=1, max_size=MAX_ROWS)):
        if left > 0:
            runs.append((min(count, left), start))
            left -= count
    group, kv_heads = draw(st.sampled_from([1, 2, 8, 64])), draw(st.sampled_from([1, 2, 8]))
    grid = draw(st.integers(1, SMS))
    return Step(tuple(runs), group, kv_heads, grid, draw(st.just(4 * grid) | st.integers(1, 4 * grid)))


@st.composite
def decode_steps(draw: st.DrawFn) -> Step:
    """One run per row."""
    group, kv_heads, grid = (
        draw(st.sampled_from([1, 2, 8, 64])),
        draw(st.sampled_from([1, 2, 8])),
        draw(st.integers(1, SMS)),
    )
    contexts = draw(st.lists(st.integers(0, LONGEST) | st.integers(0, 1000), min_size=1, max_size=MAX_ROWS))
    return Step(tuple((1, start) for start in contexts), group, kv_heads, grid, 4 * grid)


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], EmulatedLauncher]:
    """By flags. Nothing else of the model counts here."""
    shape = {"vocab": 260, "dtype": torch.bfloat16, "head_dim": 64, "hidden": 64, "ffn": 64}
    weights = Pair(tiny_llama(tmp_path_factory.mktemp("schedule"), **shape), EmulatedLauncher, grid=1).weights
    return {flags: EmulatedLauncher(weights, flags) for flags in FLAGS}


@pytest.fixture(scope="module")
def launcher(launchers: dict[tuple[str, ...], EmulatedLauncher]) -> EmulatedLauncher:
    """With the costs that are served."""
    return launchers[()]


def schedule(launcher: EmulatedLauncher, step: Step) -> list[list[Task]]:
    """The parts of each block and KV head, in the order of their ids. A run's slot is 100 + its first row."""
    rows = sum(count for count, _ in step.runs)
    positions, counts = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
    slots = np.arange(100, 100 + rows, dtype=np.int32)
    first = 0
    for count, start in step.runs:
        counts[first] = count
        if start is not None:
            positions[first : first + count] = range(start, start + count)
        first += count
    params = Params(
        positions=positions.ctypes.data,
        slots=slots.ctypes.data,
        counts=counts.ctypes.data,
        rows=rows,
        heads=step.group * step.kv_heads,
        kv_heads=step.kv_heads,
        split_tasks=step.split_tasks,
    )
    tasks = launcher.schedule(params, step.grid)
    return [list(parts) for _, parts in groupby(tasks, key=lambda task: task.ticket)]


@pytest.mark.parametrize("flags", FLAGS, ids=["real", "parts"])
@settings(max_examples=300)
@given(step=steps())
def test_every_key_of_every_query_row_is_in_one_task(
    launchers: dict[tuple[str, ...], EmulatedLauncher], flags: tuple[str, ...], step: Step
) -> None:
    blocks = schedule(launchers[flags], step)
    check_queries(step, blocks)
    for parts in blocks:
        check_parts(parts)
    check_order(step, blocks)
    check_room(step, blocks)


def check_queries(step: Step, blocks: Sequence[Sequence[Task]]) -> None:
    """Each query row of each KV head of an active run is in one block, and the block knows its run."""
    runs = [(first, count, start, 100 + first) for first, count, start in step.active()]
    expected = [
        (*run, head, query) for run in runs for head in range(step.kv_heads) for query in range(run[1] * step.group)
    ]
    found = [(*parts[0][:5], query) for parts in blocks for query in range(parts[0].block, parts[0].queries)]
    assert sorted(found) == expected


def check_parts(parts: Sequence[Task]) -> None:
    """Of one block and KV head: the cached keys one after another, then the run's own."""
    whole = parts[0]
    tile = 0
    for part, task in enumerate(parts):
        assert (task.part, task.parts) == (part, len(parts))
        assert task[:8] == whole[:8]
        assert task.tile == tile
        assert task.old_tiles > 0 or len(parts) == 1
        tile += task.old_tiles
        assert task.new_tiles == (math.ceil(task.rows / KEY_TILE) if part == len(parts) - 1 else 0)
    assert tile == math.ceil(whole.start / KEY_TILE)
    rows = whole.queries - whole.block
    assert 0 < rows <= QUERY_BLOCK
    assert whole.tall == tall(rows)


def check_order(step: Step, blocks: Sequence[Sequence[Task]]) -> None:
    """Longest first; no two blocks and heads share a ticket."""
    tickets = [parts[0].ticket for parts in blocks]
    assert len(set(tickets)) == len(tickets)
    assert all(0 <= ticket < MAX_ROWS * step.kv_heads for ticket in tickets)
    # A part without cached keys takes as long as one with a tile of them: it has the run's own.
    work = [max(parts[0].old_tiles, 1) * parts[0].tall for parts in blocks]
    assert work == sorted(work, reverse=True)


def check_room(step: Step, blocks: Sequence[Sequence[Task]]) -> None:
    """Where anything is split, all tasks have room for their parts."""
    tasks = sum(map(len, blocks))
    assert tasks == len(blocks) or tasks <= step.split_tasks


def tall(queries: int) -> int:
    return next(size for size in (1, 2, 4) if 16 * size >= queries)


def block_cost(work: npt.ArrayLike, parts: npt.ArrayLike, queries: int) -> npt.NDArray[np.float64]:
    """Of blocks whose longest part has so much work: the costs at the top of schedule.cuh."""
    merge = 8 + np.ceil(np.divide(parts, MERGED_AT_ONCE)) * MERGED_AT_ONCE * (0.6 + queries / 16)
    return np.ceil(np.divide(work, WARPS)) * WARPS + np.where(np.greater(parts, 1), merge, 0)


def turns_cost(step: Step, tasks: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Of tasks beyond the SMs."""
    turns = np.ceil(np.divide(tasks, step.grid))
    share = whole_work(step).sum() * step.kv_heads / step.grid
    return np.where(turns > 1, 48 * (turns - 1) + share, 0)


def whole_work(step: Step) -> npt.NDArray[np.int64]:
    """Of each run's block, of one row each."""
    starts = np.array([start for _, _, start in step.active()])
    return -(-starts // KEY_TILE) * tall(step.group)


def made_cost(step: Step, blocks: Sequence[Sequence[Task]]) -> float:
    """As it was split; one run per row."""
    longest = max(float(block_cost(parts[0].old_tiles * parts[0].tall, len(parts), step.group)) for parts in blocks)
    return longest + float(turns_cost(step, sum(map(len, blocks))))


def least_cost(step: Step) -> float:
    """The same by the best of all limits of a part's work."""
    work = whole_work(step)
    limits = np.arange(1, max(work.max(), 1) + 1)[:, None]
    parts = np.maximum(-(-work // limits), 1)
    tasks = parts.sum(axis=1) * step.kv_heads
    costs = block_cost(-(-work // parts), parts, step.group).max(axis=1) + turns_cost(step, tasks)
    return float(costs[(tasks <= step.split_tasks) | (parts == 1).all(axis=1)].min())


@settings(max_examples=400)
@given(step=decode_steps())
def test_no_split_is_much_better(launcher: EmulatedLauncher, step: Step) -> None:
    # Only some limits are tried, some percent apart. With the next one a block may take its warps a round longer, and
    # another one be merged that need not be.
    missed = WARPS + float(block_cost(0, MERGED_AT_ONCE, step.group))
    assert made_cost(step, schedule(launcher, step)) <= 1.1 * least_cost(step) + missed


def test_splits_are_the_best_ones_but_for_few(launcher: EmulatedLauncher) -> None:
    chosen = random.Random(1)
    ratios = []
    for _ in range(400):
        most = chosen.choice([500, 2000, 8000, LONGEST])
        contexts = [chosen.randint(1, most) for _ in range(chosen.randint(1, MAX_ROWS))]
        step = Step(tuple((1, start) for start in contexts), chosen.choice([2, 4, 8]), 8, SMS)
        ratios.append(made_cost(step, schedule(launcher, step)) / least_cost(step))
    assert np.mean(ratios) < 1.005
    assert np.mean(np.greater(ratios, 1.1)) < 0.01


def test_the_tallest_run_gets_the_most_parts(launcher: EmulatedLauncher) -> None:
    step = Step(((1, 1380), (2, 356), (3, 868), (6, 1892)), group=8, kv_heads=8, grid=SMS)
    blocks = schedule(launcher, step)
    tiles = {parts[0].first: [task.old_tiles for task in parts] for parts in blocks}
    # Of 16 tasks a KV head, for 87, 23, 2 x 55 and 4 x 119 tiles of work: 44, 23, 38 and 48 in the longest parts.
    assert tiles == {0: [44, 43], 1: [23], 3: [19, 19, 17], 6: [12] * 9 + [11]}
    assert [parts[0].first for parts in blocks] == [6] * 8 + [0] * 8 + [3] * 8 + [1] * 8
    assert [parts[0].head for parts in blocks] == 4 * list(range(8))


@pytest.mark.parametrize(
    ("contexts", "parts"),
    [
        ([144], [1]),  # 9 tiles: merging two parts takes longer than the second round
        ([272], [3]),  # 17 tiles, of which each warp would take up to three
        ([8000, *[100] * 15], [16, *[1] * 15]),  # the long one goes into a second turn rather than to one SM a head
        ([1124] * 16, [1] * 16),  # a second turn would take longer
    ],
)
def test_parts_are_made_where_they_pay(launcher: EmulatedLauncher, contexts: list[int], parts: list[int]) -> None:
    step = Step(tuple((1, context) for context in contexts), group=2, kv_heads=8, grid=SMS)
    blocks = sorted(schedule(launcher, step), key=lambda block: (block[0].head, block[0].first))
    assert [len(block) for block in blocks] == 8 * parts
