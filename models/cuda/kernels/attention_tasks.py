"""The work list of paged attention, made on the device once per step from positions and runs.

Rows of a run are cut into tiles, a tile's keys into ranges of about the same length over all tiles: one task each, so that
few long contexts fill the device as well as many short ones. The longest tasks come first, since a launch ends soonest if it
does not begin them last; in steps of many rows, which are prompts mostly, the later rows do, whose contexts are the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from models.cuda.tiles import TileShape

MOST_SORTED = 256
"""Rows of a step up to which tasks are sorted, each row against each."""
RECORD = 8
"""Words of a task: first row of its tile, rows of the tile, slot, first key, key after the last, tasks of the tile, and in the
scratch of split tiles this task's cell and that of the tile's first task. A task without keys is none."""


@triton.jit(
    do_not_specialize=["rows", "goal", "capacity", "cells"],
    do_not_specialize_on_alignment=["positions", "leaders", "counts", "slots"],
)
def _list_tasks(
    positions: tl.tensor,
    leaders: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    tasks: tl.tensor,
    tickets: tl.tensor,
    rows,
    goal,
    capacity,
    cells,
    TILE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SORTED: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    inside = row < rows
    leader = tl.minimum(tl.maximum(tl.load(leaders + row, mask=inside, other=0), 0), rows - 1)
    slot = tl.load(slots + row, mask=inside, other=0)
    left = leader + tl.load(counts + leader, mask=inside, other=0) - row
    active = tl.load(positions + row, mask=inside, other=-1) >= 0
    leads = active & (left > 0) & (row >= leader) & ((row - leader) % TILE_ROWS == 0)
    height = tl.minimum(left, TILE_ROWS)
    length = tl.load(positions + tl.minimum(row + height, rows) - 1, mask=leads, other=-1) + 1

    share = tl.cdiv(tl.sum(length.to(tl.int64), axis=0), goal)
    share = tl.maximum(tl.cdiv(share, BLOCK_KEYS) * BLOCK_KEYS, LEAST_KEYS).to(tl.int32)
    count = tl.cdiv(length, share)
    size = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), BLOCK_KEYS) * BLOCK_KEYS
    count = tl.cdiv(length, tl.maximum(size, 1))
    total = tl.sum(count, axis=0)
    if SORTED:
        longer = (size[None, :] > size[:, None]) | ((size[None, :] == size[:, None]) & (row[None, :] > row[:, None]))
        place = tl.sum(tl.where(longer, count[None, :], 0), axis=1)
    else:
        place = total - tl.cumsum(count, axis=0)
    parts = tl.where(count > 1, count, 0)
    cell = tl.cumsum(parts, axis=0) - parts
    for number in range(tl.max(count, axis=0)):
        wanted = number < count
        task = tasks + (place + number) * WORDS
        tl.store(task, row, mask=wanted)
        tl.store(task + 1, height, mask=wanted)
        tl.store(task + 2, slot, mask=wanted)
        tl.store(task + 3, number * size, mask=wanted)
        tl.store(task + 4, tl.minimum((number + 1) * size, length), mask=wanted)
        tl.store(task + 5, count, mask=wanted)
        tl.store(task + 6, cell + number, mask=wanted)
        tl.store(task + 7, cell, mask=wanted)
    for start in range(0, capacity, BLOCK):
        idle = start + row
        unused = (idle >= total) & (idle < capacity)
        tl.store(tasks + idle * WORDS + 3, 0, mask=unused)
        tl.store(tasks + idle * WORDS + 4, 0, mask=unused)
    for start in range(0, cells, BLOCK):
        tl.store(tickets + start + row, 0, mask=start + row < cells)


@dataclass(frozen=True, slots=True)
class TaskList:
    """A step's tasks, on the device."""

    tasks: torch.Tensor
    """[capacity, RECORD] int32."""
    tickets: torch.Tensor
    """[cells, kv_heads] int32, all 0 between launches of the attention."""
    tile_rows: int
    """Token rows of a tile."""

    @property
    def capacity(self) -> int:
        """Tasks at most."""
        return len(self.tasks)

    @property
    def cells(self) -> int:
        """Tasks of split tiles at most."""
        return len(self.tickets)


def task_capacity(rows: int, runs: int, tile_rows: int, shape: TileShape) -> tuple[int, int]:
    """How many tasks, and how many tasks of split tiles, T = `rows` rows of at most `runs` runs can have.

    A tile of n tasks, n > 1, has more keys than n / 2 shares, and all keys are `shape.tasks` shares.
    """
    most = min(rows, runs)
    return (rows + most * (tile_rows - 1)) // tile_rows + shape.tasks, 2 * shape.tasks


def list_tasks(
    positions: torch.Tensor,
    leaders: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    *,
    runs: int,
    group: int,
    kv_heads: int,
    shape: TileShape,
) -> TaskList:
    """The tasks of T rows.

    Args:
        positions, leaders, counts, slots: [T] int32, see `Rows`; a run is active or inactive as a whole.
        runs: an upper bound of the number of active runs.
        group: query heads per KV head.
        kv_heads: KV heads on this device.
        shape: how to cut.
    """
    rows, tile_rows = len(positions), shape.query_rows // group
    capacity, cells = task_capacity(rows, runs, tile_rows, shape)
    tasks = positions.new_empty((capacity, RECORD))
    tickets = positions.new_empty((cells, kv_heads))
    block = max(triton.next_power_of_2(rows), 64)
    is_sorted = block <= MOST_SORTED
    _list_tasks[(1,)](
        positions,
        leaders,
        counts,
        slots,
        tasks,
        tickets,
        rows,
        shape.tasks,
        capacity,
        cells * kv_heads,
        TILE_ROWS=tile_rows,
        BLOCK_KEYS=shape.keys,
        LEAST_KEYS=shape.least_keys,
        WORDS=RECORD,
        BLOCK=block,
        SORTED=is_sorted,
        num_warps=block // 32 if is_sorted else min(block // 128, 16),
    )
    return TaskList(tasks, tickets, tile_rows)
