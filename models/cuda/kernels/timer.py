"""The GPU's clock and system-wide fence, which the interpreter lacks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def now(ON_DEVICE: tl.constexpr):
    """Nanoseconds, int64; 0 under the interpreter."""
    if ON_DEVICE:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return tl.full([], 0, tl.int64)


@triton.jit
def fence(ON_DEVICE: tl.constexpr):
    """Between this program's accesses before and after it, for the host too: stores and loads of every thread."""
    if ON_DEVICE:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
