"""Causal attention of token rows over paged K and V: decode, extend and prefill, lengths and pages read on the device.

A program takes one task (`attention_tasks`) and one KV head: all query heads of its group and all rows of its tile are the
M dimension, so that a page is loaded once for them. Softmax is computed online (arXiv 2205.14135); where a tile's keys are
split over tasks, the last one to finish adds the parts in the order of their keys, so that results repeat bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from models.cuda.heads import HeadShape
from models.cuda.kernels.attention_tasks import RECORD, TaskList
from models.cuda.kernels.overlap import launch_options
from models.cuda.tiles import TileShape


@triton.jit
def _attend(
    q,
    position,
    keys,
    values,
    table,
    kv_head,
    begin,
    end,
    scale,
    largest,
    weight,
    result,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys begin .. end - 1 added to the largest score (base 2), the sum of weights and the weighted sum of values.

    Without MASKED they are whole blocks that every row sees.
    """
    column = tl.arange(0, HEAD_DIM)
    for start in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_KEYS)
        inside = key < end
        page = tl.load(table + key // PAGE, mask=inside, other=0) if MASKED else tl.load(table + key // PAGE)
        cell = (page.to(tl.int64) * KV_HEADS + kv_head) * (PAGE * HEAD_DIM) + (key % PAGE) * HEAD_DIM
        cells = cell[:, None] + column[None, :]
        k = tl.load(keys + cells, mask=inside[:, None], other=0.0) if MASKED else tl.load(keys + cells)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where((key[None, :] <= position[:, None]) & inside[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, axis=1) * scale)
        base = new
        if MASKED:
            # A row that has seen no key yet: any finite number keeps the differences from being NaN.
            base = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp2(largest - base)
        p = tl.exp2(scores * scale - base[:, None])
        v = tl.load(values + cells, mask=inside[:, None], other=0.0) if MASKED else tl.load(values + cells)
        weight = weight * factor + tl.sum(p, axis=1)
        result = result * factor[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        largest = new
    return largest, weight, result


@triton.jit(do_not_specialize_on_alignment=["positions", "page_table"])
def _paged_attention(
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    tasks: tl.tensor,
    tickets: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    positions: tl.tensor,
    page_table: tl.tensor,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    task = tasks + tl.program_id(1) * WORDS
    leading = tl.load(task)
    height = tl.load(task + 1)
    slot = tl.load(task + 2)
    begin = tl.load(task + 3)
    end = tl.load(task + 4)
    parts = tl.load(task + 5)
    own = tl.load(task + 6)
    first = tl.load(task + 7)
    if begin >= end:
        if OVERLAP:
            # The kernel behind takes the end of this one for the end of all before it.
            tl.extra.cuda.gdc_wait()
        return

    group: tl.constexpr = HEADS // KV_HEADS
    place = tl.arange(0, BLOCK_ROWS)
    row = leading + place // group
    exists = place // group < height
    live = exists[:, None]
    position = tl.load(positions + row, mask=exists, other=-1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, HEAD_DIM)
    head = kv_head * group + place % group
    wide_row = row.to(tl.int64)
    query = qkv + wide_row[:, None] * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(query, mask=live, other=0.0)

    table = page_table + slot.to(tl.int64) * table_stride
    largest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    result = tl.zeros([BLOCK_ROWS, HEAD_DIM], dtype=tl.float32)
    masked = begin
    if WHOLE_BLOCKS:
        seen = tl.minimum(tl.load(positions + leading) + 1, end)
        masked = tl.maximum(begin, begin + (seen - begin) // BLOCK_KEYS * BLOCK_KEYS)
        largest, weight, result = _attend(
            q,
            position,
            keys,
            values,
            table,
            kv_head,
            begin,
            masked,
            scale,
            largest,
            weight,
            result,
            KV_HEADS=KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            PAGE=PAGE,
            BLOCK_KEYS=BLOCK_KEYS,
            STAGES=STAGES,
            MASKED=False,
        )
    largest, weight, result = _attend(
        q,
        position,
        keys,
        values,
        table,
        kv_head,
        masked,
        end,
        scale,
        largest,
        weight,
        result,
        KV_HEADS=KV_HEADS,
        HEAD_DIM=HEAD_DIM,
        PAGE=PAGE,
        BLOCK_KEYS=BLOCK_KEYS,
        STAGES=STAGES,
        MASKED=True,
    )

    target = out + wide_row[:, None] * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    if parts == 1:
        tl.store(target, (result / tl.where(live, weight[:, None], 1.0)).to(q.dtype), mask=live)
        return
    cell = (own * KV_HEADS + kv_head).to(tl.int64) * BLOCK_ROWS + place
    tl.store(sums + cell[:, None] * HEAD_DIM + column[None, :], result, mask=live)
    tl.store(scales + 2 * cell, largest, mask=exists)
    tl.store(scales + 2 * cell + 1, weight, mask=exists)
    tl.debug_barrier()
    ticket = tickets + first * KV_HEADS + kv_head
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") < parts - 1:
        return
    # The next layer counts from 0 again.
    tl.store(ticket, 0)
    largest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    result = tl.zeros([BLOCK_ROWS, HEAD_DIM], dtype=tl.float32)
    for part in range(first, first + parts):
        cell = (part * KV_HEADS + kv_head).to(tl.int64) * BLOCK_ROWS + place
        top = tl.load(scales + 2 * cell, mask=exists, other=float("-inf"), cache_modifier=".cg")
        added = tl.load(scales + 2 * cell + 1, mask=exists, other=0.0, cache_modifier=".cg")
        piece = tl.load(sums + cell[:, None] * HEAD_DIM + column[None, :], mask=live, other=0.0, cache_modifier=".cg")
        new = tl.maximum(largest, top)
        base = tl.where(new == float("-inf"), 0.0, new)
        old, fresh = tl.exp2(largest - base), tl.exp2(top - base)
        weight = weight * old + added * fresh
        result = result * old[:, None] + piece * fresh[:, None]
        largest = new
    tl.store(target, (result / tl.where(live, weight[:, None], 1.0)).to(q.dtype), mask=live)


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Where the parts of split tiles meet."""

    sums: torch.Tensor
    """[cells, kv_heads, query_rows, head_dim] float32."""
    scales: torch.Tensor
    """[cells, kv_heads, query_rows, 2] float32: largest score (base 2) and sum of weights."""

    @classmethod
    def of(cls, tasks: TaskList, shape: HeadShape, tiles: TileShape) -> AttentionScratch:
        """For a step's tasks."""
        cells = (tasks.cells, shape.kv_heads, tiles.query_rows)
        return cls(
            sums=torch.empty((*cells, shape.head_dim), dtype=torch.float32, device=tasks.tasks.device),
            scales=torch.empty((*cells, 2), dtype=torch.float32, device=tasks.tasks.device),
        )


def paged_attention(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    tasks: TaskList,
    scratch: AttentionScratch,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    shape: HeadShape,
    tiles: TileShape,
    *,
    overlap: bool = False,
) -> None:
    """Attend with the q of `qkv` to the keys up to each row's position, its own included; inactive rows of `out` are left.

    Args:
        qkv: [T, (heads + 2 kv_heads) * head_dim] as `rotate_store` leaves it.
        keys, values: [pages, kv_heads, page_size, head_dim] of this layer, holding those of all T rows.
        out: [T, heads * head_dim].
        tasks: of these rows, made with `tiles`.
        scratch: made for `tasks`.
        positions: [T] int32, see `Rows`.
        page_table: [slots, pages] int32, rows contiguous.
        shape, tiles: of the heads and of the cut.
        overlap: start while the kernel ahead ends, which may write `qkv`, `keys` and `values` alone.
    """
    _paged_attention[(shape.kv_heads, tasks.capacity)](
        qkv,
        keys,
        values,
        out,
        tasks.tasks,
        tasks.tickets,
        scratch.sums,
        scratch.scales,
        positions,
        page_table,
        page_table.stride(0),
        shape.head_dim**-0.5 * math.log2(math.e),
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE=shape.page_size,
        WORDS=RECORD,
        BLOCK_ROWS=tiles.query_rows,
        BLOCK_KEYS=tiles.keys,
        STAGES=tiles.stages,
        WHOLE_BLOCKS=tiles.whole_blocks,
        OVERLAP=overlap,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap),
    )
