"""The stream that models/cuda/packing.py writes, walked as mega/stream.cuh and mega/product.cuh walk it."""

from __future__ import annotations

import pytest
import torch

from models.cuda.packing import BLOCK, TILE_UNITS, UNIT, Layout

SHAPES = [(64, 96, 3), (1000, 64, 7), (24, 160, 26), (2200, 32, 132)]


def walk(packed: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[8 * units, inputs] from the kernel's own arithmetic, element by element of a lane's registers."""
    weight = torch.full((layout.units * UNIT, layout.inputs), torch.nan, dtype=packed.dtype)
    at = 0
    for sm in range(layout.grid):
        base, extra = divmod(layout.units, layout.grid)
        count = base + (sm < extra)
        first = sm * base + min(sm, extra)
        tiles = -(-count // TILE_UNITS)
        for tile in range(tiles):
            units = count // tiles + (tile < count % tiles)
            for block in range(layout.blocks):
                for unit in range(first, first + units):
                    for lane in range(32):
                        row, column = unit * UNIT + lane // 4, block * BLOCK + lane % 4 * 8
                        pairs = packed[at : at + 8].view(4, 2)
                        at += 8
                        # Pairs 0 2 1 3: the first two feed one multiplication, the others the next.
                        for place, pair in enumerate((0, 2, 1, 3)):
                            weight[row, column + 2 * pair : column + 2 * pair + 2] = pairs[place]
            first += units
    assert at == packed.numel()
    return weight


@pytest.mark.parametrize(("outputs", "inputs", "grid"), SHAPES)
def test_the_kernel_finds_every_weight(outputs: int, inputs: int, grid: int) -> None:
    layout = Layout(outputs, inputs, grid)
    weight = torch.randn(outputs, inputs).bfloat16()
    packed = torch.empty(layout.elements, dtype=torch.bfloat16)
    layout.pack(weight, packed)
    found = walk(packed, layout)
    assert torch.equal(found[:outputs], weight)
    assert not found[outputs:].any()


def test_rows_of_two_matrices_take_turns() -> None:
    layout = Layout(48, 64, 3, interleaved=True)
    weight = torch.randn(48, 64).bfloat16()
    packed = torch.empty(layout.elements, dtype=torch.bfloat16)
    layout.pack(weight, packed)
    found = walk(packed, layout)
    assert torch.equal(found[0::2], weight[:24])
    assert torch.equal(found[1::2], weight[24:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "grid"), SHAPES)
def test_unpacking_gives_back_what_was_packed(outputs: int, inputs: int, grid: int, interleaved: bool) -> None:
    layout = Layout(outputs, inputs, grid, interleaved)
    weight = torch.randn(outputs, inputs).bfloat16()
    packed = torch.empty(layout.elements, dtype=torch.bfloat16)
    layout.pack(weight, packed)
    assert torch.equal(layout.unpack(packed), weight)


def test_tile_mask_names_the_sizes_of_tiles() -> None:
    layout = Layout(8 * 33, 32, 2)
    assert sorted({size for _, size in layout.tiles()}) == [8, 9]
    assert layout.tile_mask() == 1 << 7 | 1 << 8
