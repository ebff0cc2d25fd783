"""Layers of a small network for few rows, weights read once: layer norm before a product, GELU, residual or sigmoid after it.

A program owns some outputs and all inputs; each of its warps takes a slice of the inputs, and the slices are added up at the
end. Weights are read before a program waits for the kernel ahead of it, so that they are on their way while that one works.
Values are rounded to the weights' type where torch's layers round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.kernels.overlap import launch_options

_SLICES = tl.constexpr(8)
_WARPS = 8
_FEW_ROWS, _MOST_ROWS = 8, 16
"""Rows that a program has room for: all that there are."""
_NARROW_OUTPUTS, _WIDE_OUTPUTS = 8, 32
"""Outputs of a program: as many as fill about 128 programs."""
_PIECE = 512
"""Inputs of one source that are multiplied at a time where they come from several."""


@triton.jit
def _slices(inputs: tl.constexpr):
    """[slices, 1, inputs of a slice] numbers of all inputs."""
    part: tl.constexpr = inputs // _SLICES
    return tl.arange(0, _SLICES)[:, None, None] * part + tl.arange(0, part)[None, None, :]


@triton.jit
def _columns(inputs: tl.constexpr):
    """[slices, inputs of a slice, 1] the same."""
    part: tl.constexpr = inputs // _SLICES
    return tl.arange(0, _SLICES)[:, None, None] * part + tl.arange(0, part)[None, :, None]


@triton.jit(do_not_specialize=["rows"])
def _combine(
    hidden: tl.tensor,
    tokens: tl.tensor,
    embedding: tl.tensor,
    top: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows,
    width,
    hidden_pitch,
    token_pitch,
    HIDDEN: tl.constexpr,
    EMBEDDING: tl.constexpr,
    TOP: tl.constexpr,
    PIECE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = [hidden; embedding[tokens]; top] W^T + b; the kernel ahead gives `top` alone."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    pitch: tl.constexpr = HIDDEN + EMBEDDING + TOP
    first = tl.program_id(0) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)[None, :]
    own = weight + (first + tl.arange(0, OUTPUTS)[None, None, :]) * pitch
    last = tl.load(own + HIDDEN + EMBEDDING + _columns(TOP))
    b = tl.load(bias + output).to(tl.float32)
    row = tl.arange(0, ROWS)[None, :, None]
    live = row < rows
    product = tl.zeros([_SLICES, ROWS, OUTPUTS], dtype=tl.float32)
    for place in range(0, HIDDEN, PIECE):
        x = tl.load(hidden + row * hidden_pitch + place + _slices(PIECE), mask=live, other=0.0)
        product = tl.dot(x.to(last.dtype), tl.load(own + place + _columns(PIECE)), product)
    known = embedding + tl.load(tokens + row * token_pitch, mask=live, other=0).to(tl.int64) * EMBEDDING
    for place in range(0, EMBEDDING, PIECE):
        x = tl.load(known + place + _slices(PIECE), mask=live, other=0.0)
        product = tl.dot(x.to(last.dtype), tl.load(own + HIDDEN + place + _columns(PIECE)), product)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(top + row * TOP + _slices(TOP), mask=live, other=0.0)
    product = tl.sum(tl.dot(x.to(last.dtype), last, product), axis=0)
    row = tl.arange(0, ROWS)[:, None]
    tl.store(out + row * width + output, (product + b).to(last.dtype), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _norm_widen(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows,
    wide,
    eps,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = gelu(LayerNorm(x) W^T + b)"""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)[None, :]
    w = tl.load(weight + (first + tl.arange(0, OUTPUTS)[None, None, :]) * WIDTH + _columns(WIDTH))
    b = tl.load(bias + output).to(tl.float32)
    factor = tl.load(norm + _slices(WIDTH)).to(tl.float32)
    shift = tl.load(norm + WIDTH + _slices(WIDTH)).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, ROWS)[None, :, None]
    off = tl.load(x + row * WIDTH + _slices(WIDTH), mask=row < rows, other=0.0).to(tl.float32)
    off -= tl.sum(tl.sum(off, axis=2), axis=0)[None, :, None] / WIDTH
    variance = tl.sum(tl.sum(off * off, axis=2), axis=0)[None, :, None] / WIDTH
    normed = off * tl.rsqrt(variance + eps) * factor + shift
    product = tl.sum(tl.dot(normed.to(w.dtype), w), axis=0)
    y = (product + b).to(w.dtype).to(tl.float32)
    y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    row = tl.arange(0, ROWS)[:, None]
    tl.store(out + row * wide + output, y.to(w.dtype), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _narrow_add(
    y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    x: tl.tensor,
    rows,
    width,
    WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """x = x + (y W^T + b)"""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)[None, :]
    w = tl.load(weight + (first + tl.arange(0, OUTPUTS)[None, None, :]) * WIDE + _columns(WIDE))
    b = tl.load(bias + output).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, ROWS)[:, None]
    place = x + row * width + output
    kept = tl.load(place, mask=row < rows, other=0.0).to(tl.float32)
    row = tl.arange(0, ROWS)[None, :, None]
    part = tl.load(y + row * WIDE + _slices(WIDE), mask=row < rows, other=0.0)
    added = (tl.sum(tl.dot(part, w), axis=0) + b).to(w.dtype).to(tl.float32)
    row = tl.arange(0, ROWS)[:, None]
    tl.store(place, (kept + added).to(w.dtype), mask=row < rows)


@triton.jit
def _judge(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    thresholds: tl.tensor,
    probabilities: tl.tensor,
    reached: tl.tensor,
    threshold_pitch,
    eps,
    calibrated,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """p = sigmoid(w LayerNorm(x) + b), and whether it reaches the row's threshold; below 0, that is `calibrated`."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    factor = tl.load(norm + column).to(tl.float32)
    shift = tl.load(norm + WIDTH + column).to(tl.float32)
    w = tl.load(weight + column)
    b = tl.load(bias).to(tl.float32)
    threshold = tl.load(thresholds + row * threshold_pitch)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    off = tl.load(x + row * WIDTH + column).to(tl.float32)
    off -= tl.sum(off, axis=0) / WIDTH
    normed = off * tl.rsqrt(tl.sum(off * off, axis=0) / WIDTH + eps) * factor + shift
    logit = tl.sum(normed.to(w.dtype).to(tl.float32) * w.to(tl.float32), axis=0) + b
    p = 1.0 / (1.0 + tl.exp(-logit))
    tl.store(probabilities + row, p)
    tl.store(reached + row, (p >= tl.where(threshold >= 0.0, threshold, calibrated)).to(tl.int64))


def _row_block(rows: int) -> int:
    if rows > _MOST_ROWS:
        raise ValueError(f"{rows} rows, and room for {_MOST_ROWS}")
    return _FEW_ROWS if rows <= _FEW_ROWS else _MOST_ROWS


def combine(
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    top: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    overlap: bool,
) -> torch.Tensor:
    """[R, width] = [hidden; embedding[tokens]; top] W^T + b.

    Args:
        hidden: [R, H], rows contiguous, any floating type, H a multiple of 512.
        tokens: [R] rows of `embedding`.
        embedding: [V, E] contiguous, any floating type, E a multiple of 512.
        top: [R, K], K a power of two and at least 128: the one thing that the kernel ahead may write.
        weight: [width, H + E + K], width a multiple of 8.
        bias: [width]
        overlap: start while the kernel ahead ends.
    """
    rows, width = len(hidden), len(weight)
    out = weight.new_empty((rows, width))
    _combine[(width // _NARROW_OUTPUTS,)](
        hidden,
        tokens,
        embedding,
        top,
        weight,
        bias,
        out,
        rows,
        width,
        hidden.stride(0),
        tokens.stride(0),
        HIDDEN=hidden.shape[1],
        EMBEDDING=embedding.shape[1],
        TOP=top.shape[1],
        PIECE=_PIECE,
        OUTPUTS=_NARROW_OUTPUTS,
        ROWS=_row_block(rows),
        OVERLAP=overlap,
        num_warps=_WARPS,
        num_stages=1,
        **launch_options(overlap),
    )
    return out


def norm_widen(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    overlap: bool,
) -> None:
    """out [R, wide] = gelu(LayerNorm(x) W^T + b).

    Args:
        x: [R, width], width a power of two from 128 to 1,024.
        norm: [2, width] the norm's weight and bias.
        weight: [wide, width], wide a multiple of 32.
        bias: [wide]
        out: where it goes.
        eps: the norm's.
        overlap: start while the kernel ahead ends, which may write `x` alone.
    """
    rows, wide = out.shape
    _norm_widen[(wide // _WIDE_OUTPUTS,)](
        x,
        norm,
        weight,
        bias,
        out,
        rows,
        wide,
        eps,
        WIDTH=x.shape[1],
        OUTPUTS=_WIDE_OUTPUTS,
        ROWS=_row_block(rows),
        OVERLAP=overlap,
        num_warps=_WARPS,
        num_stages=1,
        **launch_options(overlap),
    )


def narrow_add(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, *, overlap: bool) -> None:
    """x [R, width] += y W^T + b.

    Args:
        y: [R, wide], wide a power of two from 128 to 4,096.
        weight: [width, wide], width a multiple of 8.
        bias: [width]
        x: changed in place.
        overlap: start while the kernel ahead ends, which may write `x` and `y` alone.
    """
    rows, width = x.shape
    _narrow_add[(width // _NARROW_OUTPUTS,)](
        y,
        weight,
        bias,
        x,
        rows,
        width,
        WIDE=y.shape[1],
        OUTPUTS=_NARROW_OUTPUTS,
        ROWS=_row_block(rows),
        OVERLAP=overlap,
        num_warps=_WARPS,
        num_stages=1,
        **launch_options(overlap),
    )


def judge(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    thresholds: torch.Tensor,
    eps: float,
    calibrated: float,
    *,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] float32 sigmoid(w LayerNorm(x) + b), and [R] int64: 1 where it reaches the threshold.

    Args:
        x: [R, width], width a power of two.
        norm: [2, width] the norm's weight and bias.
        weight: [1, width]
        bias: [1]
        thresholds: [R] float32; `calibrated` takes the place of those below 0.
        eps: the norm's.
        calibrated: a threshold.
        overlap: start while the kernel ahead ends, which may write `x` alone.
    """
    rows, width = x.shape
    probabilities = thresholds.new_empty(rows)
    reached = torch.empty(rows, dtype=torch.int64, device=x.device)
    _judge[(rows,)](
        x,
        norm,
        weight,
        bias,
        thresholds,
        probabilities,
        reached,
        thresholds.stride(0),
        eps,
        calibrated,
        WIDTH=width,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
    return probabilities, reached
