"""Root mean square norm, with what precedes it: a gather of rows and the addition of a residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.kernels.overlap import launch_options


@triton.jit(do_not_specialize=["limit"], do_not_specialize_on_alignment=["index"])
def _rms_norm(
    source: tl.tensor,
    delta: tl.tensor,
    index: tl.tensor,
    weight: tl.tensor,
    kept: tl.tensor,
    out: tl.tensor,
    limit,
    width,
    eps,
    HAS_INDEX: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row
    if HAS_INDEX:
        place = tl.minimum(tl.maximum(tl.load(index + row), 0), limit - 1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(source + place * width + column, mask=inside, other=0.0)
    kind = x.dtype
    if HAS_DELTA:
        added = tl.load(delta + place * width + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(kind)
    if KEEP:
        tl.store(kept + row * width + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(kind).to(tl.float32)
    tl.store(out + row * width + column, (normed * factor).to(kind), mask=inside)


def rms_norm(
    source: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """out = norm(x) * weight with x = source (+ delta), rounded where `models.decoder.rms_norm` rounds.

    Args:
        source: [S, H] contiguous.
        weight: [H].
        eps: added to the mean square.
        out: [T, H].
        delta: [S, H] added to `source`, the sum rounded to its dtype; None adds nothing.
        index: [T] int32 rows of `source` (and `delta`) to take, those outside it brought to its ends; None takes all.
        keep: [T, H] where x goes; may be `source` when there is no index. None keeps nothing.
        overlap: start while the kernel ahead ends, which must not write `weight` or `index`.
    """
    width = source.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm[(len(out),)](
        source,
        source if delta is None else delta,
        source if index is None else index,
        weight,
        out if keep is None else keep,
        out,
        len(source),
        width,
        eps,
        HAS_INDEX=index is not None,
        HAS_DELTA=delta is not None,
        KEEP=keep is not None,
        OVERLAP=overlap,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(overlap),
    )
