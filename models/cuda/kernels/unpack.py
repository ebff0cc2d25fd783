"""A plain matrix from a packed one, in one pass over both: see models/cuda/packing.py for the order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.packing import BLOCK, UNIT, Layout

_BLOCKS = 16
"""Of a unit, by one program: 8 KiB."""
_WORDS = tl.constexpr(BLOCK // 2)
"""32-bit words of a row of a block: pairs of inputs."""
_ROWS = tl.constexpr(UNIT)


@triton.jit
def _unpack(
    packed: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    units,
    blocks,
    outputs,
    INTERLEAVED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    unit = tl.program_id(0)
    first = tl.load(table + unit)
    width = tl.load(table + units + unit)
    row = tl.arange(0, _ROWS)[:, None, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    word = tl.arange(0, _WORDS)[None, None, :]
    place = first.to(tl.int64) * blocks + block * width + unit - first
    words = tl.load(packed + (place * _ROWS + row) * _WORDS + word, mask=block < blocks, other=0)
    # A lane's four pairs lie in the order 0 2 1 3, which is its own inverse: a 2 x 2 transposition.
    lanes = tl.reshape(words, (_ROWS, BLOCKS, _WORDS // 4, 2, 2))
    words = tl.reshape(tl.permute(lanes, (0, 1, 2, 4, 3)), (_ROWS, BLOCKS, _WORDS))
    output = unit.to(tl.int64) * _ROWS + row
    inside = (block < blocks) & (output < outputs)
    if INTERLEAVED:
        output = output % 2 * (outputs // 2) + output // 2
    tl.store(out + (output * blocks + block) * _WORDS + word, words, mask=inside)


def unpack(layout: Layout, packed: torch.Tensor, out: torch.Tensor) -> None:
    """Write what `layout.pack` was given.

    Args:
        layout: of the packed matrix.
        packed: [layout.elements] bfloat16.
        out: [outputs, inputs] bfloat16, contiguous.
    """
    words = torch.int32
    _unpack[(layout.units, triton.cdiv(layout.blocks, _BLOCKS))](
        packed.view(words),
        layout.unit_table(packed.device),
        out.view(words),
        layout.units,
        layout.blocks,
        layout.outputs,
        INTERLEAVED=layout.interleaved,
        BLOCKS=_BLOCKS,
        num_warps=4,
    )
