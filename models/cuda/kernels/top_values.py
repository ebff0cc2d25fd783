"""The largest values of each row, sorted: what `torch.topk` gives, without the indices.

A row is cut into chunks; every chunk gives up its candidates, and one program per row picks from them. Both find by bisection a
value that about as many elements reach as are wanted, over floats read as integers of the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.kernels.overlap import launch_options

_CHUNK = 4096


@triton.jit
def _flip(bits):
    """Bits of floats as integers that compare alike, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keep(key, slots, SLOTS: tl.constexpr, WANTED: tl.constexpr):
    """Write to [SLOTS] the WANTED largest of some flipped floats, a few more perhaps; free slots get the least of the wanted if
    so many equal it that they have no room, else minus infinity.
    """
    low = tl.min(key, axis=0).to(tl.int64)
    high = tl.max(key, axis=0).to(tl.int64) + 1
    # Always: at least WANTED keys reach `low`, fewer reach `high`.
    reach = tl.sum((key >= low.to(tl.int32)).to(tl.int32), axis=0)
    while (reach > SLOTS) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = count >= WANTED
        low = tl.where(enough, middle, low)
        reach = tl.where(enough, count, reach)
        high = tl.where(enough, high, middle)
    crowded = reach > SLOTS
    least = low.to(tl.int32)
    kept = tl.where(crowded, key > least, key >= least)
    place = tl.cumsum(kept.to(tl.int32), axis=0)
    tl.store(slots + place - 1, _flip(key).to(tl.float32, bitcast=True), mask=kept)
    slot = tl.arange(0, SLOTS)
    rest = tl.where(crowded, _flip(least), _flip(tl.full([], -0x7F800001, tl.int32)))
    rest = (tl.zeros([SLOTS], tl.int32) + rest).to(tl.float32, bitcast=True)
    tl.store(slots + slot, rest, mask=slot >= tl.max(place, axis=0))


@triton.jit
def _candidates(
    logits: tl.tensor,
    slots: tl.tensor,
    stride,
    width,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    WANTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    chunk, chunks, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf"))
    key = _flip(x.to(tl.int32, bitcast=True))
    _keep(key, slots + (row * chunks + chunk) * SLOTS, SLOTS, WANTED)


@triton.jit
def _select(
    slots: tl.tensor,
    picked: tl.tensor,
    out: tl.tensor,
    count,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    WANTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(slots + row * count + place, mask=place < count, other=float("-inf"))
    own = picked + row * SLOTS
    _keep(_flip(x.to(tl.int32, bitcast=True)), own, SLOTS, WANTED)
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    value = tl.load(own + slot)
    key = _flip(value.to(tl.int32, bitcast=True))
    before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (slot[None, :] < slot[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    # What lies past the wanted ones meets weights of zero.
    tl.store(out + row * SLOTS + rank, tl.where(rank < WANTED, value, 0.0))


def slots_of(wanted: int) -> int:
    """Columns of what `top_values` gives."""
    return max(1 << (wanted * 5 // 4 - 1).bit_length(), 128)


def top_values(logits: torch.Tensor, wanted: int, *, overlap: bool = False) -> torch.Tensor:
    """[R, slots_of(wanted)] float32: the largest values of each row in falling order, then zeros.

    Args:
        logits: [R, V] float32, rows contiguous.
        wanted: how many, at most V and a few hundred.
        overlap: a next kernel that waits may start while this ends.
    """
    rows, width = logits.shape
    slots, chunks = slots_of(wanted), triton.cdiv(width, _CHUNK)
    candidates = logits.new_empty((rows, chunks, slots))
    picked = logits.new_empty((2, rows, slots))
    _candidates[(chunks, rows)](
        logits,
        candidates,
        logits.stride(0),
        width,
        CHUNK=_CHUNK,
        SLOTS=slots,
        WANTED=wanted,
        OVERLAP=overlap,
        num_warps=8,
    )
    _select[(rows,)](
        candidates,
        picked[0],
        picked[1],
        chunks * slots,
        BLOCK=max(triton.next_power_of_2(chunks * slots), slots),
        SLOTS=slots,
        WANTED=wanted,
        OVERLAP=overlap,
        num_warps=16,
        **launch_options(overlap),
    )
    return picked[1]
