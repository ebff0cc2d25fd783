"""How models/cuda/shares.py deals a matrix out, beside the arithmetic of mega/stream.cuh, and the boxes in which it is fetched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.cuda.shares import BLOCK, BLOCK_BYTES, STAGE_BYTES, TILE_UNITS, UNIT, WARPS, Shares
from models.cuda.tensor_map import Boxes, layer_units
from tests.models.cuda.emulated import fetch


def tiles_of(shares: Shares) -> list[tuple[int, int]]:
    """First unit and units of every tile, as the SMs find them."""
    found = []
    for sm in range(shares.grid):
        base, extra = divmod(shares.units, shares.grid)
        count = base + (sm < extra)
        first = sm * base + min(sm, extra)
        tiles = -(-count // TILE_UNITS)
        for tile in range(tiles):
            units = count // tiles + (tile < count % tiles)
            found.append((first, units))
            first += units
    return found


@given(st.integers(1, 20_000), st.integers(1, 900), st.integers(1, 140))
def test_tiles_have_the_sizes_that_are_told(units: int, blocks: int, grid: int) -> None:
    shares = Shares(units * UNIT, blocks * BLOCK, grid)
    tiles = tiles_of(shares)
    sizes = sorted({size for _, size in tiles})
    assert sum(size for _, size in tiles) == units
    assert shares.tile_sizes() == tuple(sizes)
    assert len(sizes) <= 3
    assert shares.tile_mask() == sum(1 << (size - 1) for size in sizes)
    for size in sizes:
        step = shares.step(size)
        assert step >= 1
        assert step * size * BLOCK_BYTES <= STAGE_BYTES
        # No smaller number of chunks would give every warp the same number of them.
        assert -(-blocks // step) <= -(-blocks // (WARPS * (STAGE_BYTES // (size * BLOCK_BYTES)))) * WARPS


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "grid"), [(64, 192, 3), (1000, 64, 7), (24, 320, 26), (2200, 64, 132), (48, 832, 1)]
)
def test_the_kernel_finds_every_weight(outputs: int, inputs: int, grid: int, interleaved: bool) -> None:
    stack = torch.randn(2, outputs, inputs).bfloat16()
    shares = Shares(outputs, inputs, grid, interleaved)
    for layer, weight in enumerate(stack):
        found = torch.full((outputs, inputs), torch.nan, dtype=torch.bfloat16)
        for first, units in tiles_of(shares):
            boxes, step = Boxes.of(stack, shares, units), shares.step(units)
            for block in range(0, shares.blocks, step):
                chunk = fetch(boxes, layer * layer_units(stack, shares) + first, block)
                # Even rows come first.
                rows = chunk.view(step, units, 2, UNIT // 2, BLOCK).transpose(2, 3).reshape(step, units * UNIT, BLOCK)
                inside = min(step, shares.blocks - block)
                assert not rows[inside:].any()
                own = slice(first * UNIT, (first + units) * UNIT)
                columns = slice(block * BLOCK, (block + inside) * BLOCK)
                found[own, columns] = rows[:inside].transpose(0, 1).reshape(units * UNIT, -1)
        if interleaved:
            assert torch.equal(found[0::2], weight[: outputs // 2])
            assert torch.equal(found[1::2], weight[outputs // 2 :])
        else:
            assert torch.equal(found, weight)
