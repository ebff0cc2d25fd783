"""The work list of paged attention, made on the device once per step from positions and runs.

Rows of a run are cut into tiles, a tile's keys into ranges of about the same length over all tiles: one task each, so that
few long contexts fill the device as well as many short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

UNSPLIT = 1 << 30


@triton.jit(do_not_specialize=["rows", "goal", "capacity"])
def _list_tasks(
    positions: tl.tensor,
    leaders: tl.tensor,
    tasks: tl.tensor,
    total: tl.tensor,
    rows,
    goal,
    capacity,
    TILE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    inside = row < rows
    leader = tl.load(leaders + row, mask=inside, other=0)
    length = tl.zeros([BLOCK], dtype=tl.int32)
    for step in range(TILE_ROWS):
        mate = row + step
        same = tl.load(leaders + mate, mask=mate < rows, other=-1) == leader
        length = tl.maximum(length, tl.where(same, tl.load(positions + mate, mask=mate < rows, other=-1) + 1, 0))
    length = tl.where(inside & ((row - leader) % TILE_ROWS == 0), length, 0)

    share = tl.cdiv(tl.sum(length.to(tl.int64), axis=0), tl.maximum(goal, 1))
    share = tl.maximum(tl.cdiv(share, BLOCK_KEYS) * BLOCK_KEYS, LEAST_KEYS).to(tl.int32)
    count = tl.cdiv(length, share)
    size = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), BLOCK_KEYS) * BLOCK_KEYS
    count = tl.cdiv(length, tl.maximum(size, 1))
    first = tl.cumsum(count, axis=0) - count
    tl.store(total, tl.sum(count, axis=0))
    for number in range(tl.max(count, axis=0)):
        wanted = number < count
        task = tasks + first + number
        tl.store(task, row, mask=wanted)
        tl.store(task + capacity, number * size, mask=wanted)
        tl.store(task + 2 * capacity, tl.minimum((number + 1) * size, length), mask=wanted)
        tl.store(task + 3 * capacity, first, mask=wanted)
        tl.store(task + 4 * capacity, count, mask=wanted)


@dataclass(frozen=True, slots=True)
class TileShape:
    """How attention is cut, fixed when a step is captured."""

    query_rows: int
    """Query heads times token rows of a tile: 16, 32, 64, ..."""
    keys: int
    """Keys that a program handles at a time."""
    least_keys: int
    """Keys of a task at least, where the context has as many; UNSPLIT: all of them."""
    tasks: int
    """Tasks per KV head that the keys of all tiles are spread over, besides one for each tile; 0 with UNSPLIT."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class TaskList:
    """A step's tasks, on the device."""

    tasks: torch.Tensor
    """[5, capacity] int32: first row of the tile, first key, key after the last, first task of the tile, its task count."""
    total: torch.Tensor
    """[1] int32 tasks in use."""
    tile_rows: int
    """Token rows of a tile."""

    @property
    def capacity(self) -> int:
        """Tasks at most."""
        return self.tasks.shape[1]


def list_tasks(
    positions: torch.Tensor, leaders: torch.Tensor, group: int, shape: TileShape, tiles: int | None = None
) -> TaskList:
    """The tasks of T rows.

    Args:
        positions: [T] int32, -1 for inactive rows.
        leaders: [T] int32 first row of each row's run.
        group: query heads per KV head.
        shape: how to cut.
        tiles: an upper bound of their number; None takes T.
    """
    rows, tile_rows = len(positions), shape.query_rows // group
    tasks = positions.new_empty((5, (rows if tiles is None else tiles) + shape.tasks))
    total = positions.new_empty(1)
    block = max(triton.next_power_of_2(rows), 16)
    _list_tasks[(1,)](
        positions,
        leaders,
        tasks,
        total,
        rows,
        shape.tasks,
        tasks.shape[1],
        TILE_ROWS=tile_rows,
        BLOCK_KEYS=shape.keys,
        LEAST_KEYS=shape.least_keys,
        BLOCK=block,
        num_warps=min(max(block // 128, 1), 16),
    )
    return TaskList(tasks, total, tile_rows)
