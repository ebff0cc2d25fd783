"""What lies between the QKV product and attention, in one kernel: norm of the heads, rotation, K and V into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.heads import HeadShape
from models.cuda.kernels.overlap import launch_options

_BLOCK_HEADS = 4


@triton.jit(do_not_specialize_on_alignment=["positions", "slots", "page_table"])
def _rotate_store(
    qkv: tl.tensor,
    norms: tl.tensor,
    rotations: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    page_table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position < 0:
        if OVERLAP:
            # The kernel behind takes the end of this one for the end of all before it.
            tl.extra.cuda.gdc_wait()
        return
    half: tl.constexpr = HEAD_DIM // 2
    total: tl.constexpr = HEADS + 2 * KV_HEADS
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, half)[None, :]
    exists = (head < total)[:, None]
    rotated = (head < HEADS + KV_HEADS)[:, None]
    turn = rotations + position.to(tl.int64) * HEAD_DIM + column
    cos, sin = tl.load(turn), tl.load(turn + half)
    slot = tl.load(slots + row).to(tl.int64)
    page = tl.load(page_table + slot * table_stride + position // PAGE).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    place = qkv + row * total * HEAD_DIM + head[:, None] * HEAD_DIM + column
    first = tl.load(place, mask=exists, other=0.0)
    second = tl.load(place + half, mask=exists, other=0.0)
    kind = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / HEAD_DIM + eps)[:, None]
        weight = norms + (head >= HEADS).to(tl.int32)[:, None] * HEAD_DIM + column
        x_weight = tl.load(weight, mask=rotated, other=0.0).to(tl.float32)
        y_weight = tl.load(weight + half, mask=rotated, other=0.0).to(tl.float32)
        x = ((x * scale).to(kind).to(tl.float32) * x_weight).to(kind).to(tl.float32)
        y = ((y * scale).to(kind).to(tl.float32) * y_weight).to(kind).to(tl.float32)
    first = tl.where(rotated, (x * cos - y * sin).to(kind), first)
    second = tl.where(rotated, (y * cos + x * sin).to(kind), second)

    query = (head < HEADS)[:, None]
    tl.store(place, first, mask=query)
    tl.store(place + half, second, mask=query)
    cell = page * KV_HEADS * PAGE * HEAD_DIM + (position % PAGE) * HEAD_DIM + column
    key = keys + (head - HEADS)[:, None] * PAGE * HEAD_DIM + cell
    is_key = rotated & ~query
    tl.store(key, first, mask=is_key)
    tl.store(key + half, second, mask=is_key)
    value = values + (head - HEADS - KV_HEADS)[:, None] * PAGE * HEAD_DIM + cell
    is_value = exists & ~rotated
    tl.store(value, first, mask=is_value)
    tl.store(value + half, second, mask=is_value)


def rotate_store(
    qkv: torch.Tensor,
    norms: torch.Tensor | None,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    page_table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: HeadShape,
    *,
    overlap: bool = False,
) -> None:
    """Norm and turn the heads of q in place; write normed and turned k, and v, into their pages. Inactive rows: nothing.

    Args:
        qkv: [T, (heads + 2 kv_heads) * head_dim] contiguous.
        norms: [2, head_dim] weights of q's and k's norm, or None.
        rotations: [positions, 2, head_dim / 2] float32 cos and sin.
        positions: [T] int32, -1 for inactive rows.
        slots: [T] int32 rows of `page_table`.
        page_table: [slots, pages] int32, rows contiguous.
        keys, values: [pages, kv_heads, page_size, head_dim] of this layer.
        shape: of the heads.
        overlap: start while the kernel ahead ends, which may write `qkv` alone.
    """
    total = shape.heads + 2 * shape.kv_heads
    _rotate_store[(len(qkv), triton.cdiv(total, _BLOCK_HEADS))](
        qkv,
        qkv if norms is None else norms,
        rotations,
        positions,
        slots,
        page_table,
        keys,
        values,
        page_table.stride(0),
        shape.eps,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE=shape.page_size,
        NORM=norms is not None,
        OVERLAP=overlap,
        BLOCK_HEADS=_BLOCK_HEADS,
        num_warps=max(min(_BLOCK_HEADS * shape.head_dim // 256, 4), 1),
        **launch_options(overlap),
    )
