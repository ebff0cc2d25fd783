"""The sum of all ranks' parts of a product, the residual addition and the norm after it, in one kernel.

Ranks read each other's memory (one-shot all-reduce). A program per row tells the other ranks' programs of that row that its
part is there, and waits for the same from them. Nothing tells that everybody has read: parts alternate between two places, and
whoever writes one again has seen all ranks reach the sum in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.kernels.overlap import launch_options


@triton.jit
def _tell(address, turn):
    """Write `turn` to another rank's memory.

    What earlier kernels wrote is in this device's memory since their end, where other ranks read it: no fence, half a microsecond.
    """
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %first;
            .reg .u32 %thread;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %first, %thread, 0;
            @%first st.relaxed.sys.global.u32 [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [address, turn],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _await(address, turn, patience):
    """Wait until `turn`, or a later one, is written to this rank's memory, for `patience` looks if not 0; turns may wrap around."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %other, %early, %endless, %more;
            .reg .u32 %thread, %seen, %left;
            mov.u32 %thread, %tid.x;
            setp.ne.u32 %other, %thread, 0;
            @%other bra done;
            mov.u32 %left, $3;
            setp.eq.u32 %endless, %left, 0;
        again:
            ld.acquire.sys.global.u32 %seen, [$1];
            sub.u32 %seen, %seen, $2;
            sub.u32 %left, %left, 1;
            setp.lt.s32 %early, %seen, 0;
            setp.ne.or.u32 %more, %left, 0, %endless;
            and.pred %early, %early, %more;
            @%early bra again;
        done:
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [address, turn, patience],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _elements(address, kind: tl.constexpr):
    """An address as a pointer to elements."""
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def _each(addresses, COUNT: tl.constexpr):
    """What is in each of COUNT words."""
    found = ()
    for index in tl.static_range(COUNT):
        found = found + (tl.load(addresses + index),)  # type: ignore[assignment]
    return found


@triton.jit
def _tell_all(flags, place, turn, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Tell every other rank."""
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            _tell(flags[rank] + place, turn)


@triton.jit(do_not_specialize=["patience"])
def _sum_norm(
    parts: tl.tensor,
    flags: tl.tensor,
    turns: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    offset,
    width,
    span,
    patience,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SIGNALS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = x.dtype.element_ty
    turn = tl.load(turns + row) + 1
    before = tl.load(x + row * width + column, mask=inside, other=0.0)
    scales = tl.load(weight + column, mask=inside, other=0.0)
    # Asked for before the wait: each would cost half a microsecond after it.
    flag_addresses = _each(flags, WORLD)
    part_addresses = _each(parts, WORLD)
    place = offset + row * width + column
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if SIGNALS:
        _tell_all(flag_addresses, (RANK * span + row) * 4, turn, RANK, WORLD)
    # Past the first cache, which other kernels' and devices' writes do not reach.
    own = tl.load(_elements(part_addresses[RANK], kind) + place, mask=inside, other=0.0, cache_modifier=".cg")
    if SIGNALS:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                _await(flag_addresses[RANK] + (rank * span + row) * 4, turn, patience)
        tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    # In the same order on every rank: what they hold must not differ by a bit.
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            # As wide as loads are; `volatile` would make them one element each, and links are slow with those.
            part = tl.load(_elements(part_addresses[rank], kind) + place, mask=inside, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
    added = (before.to(tl.float32) + total.to(kind).to(tl.float32)).to(kind)
    tl.store(x + row * width + column, added, mask=inside)
    wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(kind).to(tl.float32)
    tl.store(out + row * width + column, (normed * scales.to(tl.float32)).to(kind), mask=inside)
    tl.store(turns + row, turn)


def sum_norm(
    parts: torch.Tensor,
    flags: torch.Tensor,
    turns: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    rank: int,
    offset: int,
    span: int,
    patience: int = 0,
    signals: bool = True,
    overlap: bool = False,
) -> None:
    """x += the sum over ranks of their parts; out = norm(x) * weight, rounded as by `all_reduce` and `rms_norm`.

    Args:
        parts: [world] int64 addresses of every rank's parts, as this rank sees them.
        flags: [world] int64 addresses of every rank's flags: [world, span] int32, zero at first; entry (r, i) is r's turn.
        turns: [span] int32 how often this rank has summed row i, zero at first.
        x: [T, H] contiguous, T <= span.
        weight: [H].
        eps: added to the mean square.
        out: [T, H] contiguous.
        rank: this one.
        offset: elements from those addresses to the part's first row, a multiple of 16; the next call's must be another.
        span: rows that flags exist for.
        patience: how often to look for another rank's turn, about once in a microsecond, before what is there is summed;
            0 = until it is there.
        signals: False where all parts are there and stay there, as in tests.
        overlap: start while the kernel ahead ends, which must not write `x` or `weight`.
    """
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _sum_norm[(len(x),)](
        parts,
        flags,
        turns,
        x,
        weight,
        out,
        offset,
        width,
        span,
        patience,
        eps,
        RANK=rank,
        WORLD=len(parts),
        SIGNALS=signals,
        OVERLAP=overlap,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(overlap),
    )
