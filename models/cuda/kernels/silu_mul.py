"""silu(gate) * up of the fused gate-up product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.kernels.overlap import launch_options


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, width, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (tl.exp(-wide) + 1.0)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + column, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, *, overlap: bool = False) -> None:
    """out [T, F] = silu(gate) * up of gate_up [T, 2 F], both contiguous; silu is rounded to their dtype.

    With `overlap` it starts while the kernel ahead ends.
    """
    rows, width = out.shape
    block = min(triton.next_power_of_2(width), 1024)
    grid = (rows, triton.cdiv(width, block))
    _silu_mul[grid](gate_up, out, width, OVERLAP=overlap, BLOCK=block, num_warps=4, **launch_options(overlap))
