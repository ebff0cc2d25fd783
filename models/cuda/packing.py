"""Weights in the order in which the megakernel reads them.

A matrix [N, K] is cut into units of 8 outputs and blocks of 32 inputs. Units are dealt to SMs in turn, so that every SM has
one run of them; a run is cut into tiles of up to 15 units, and within a tile all units of one block of inputs lie side by
side. A unit's block is 512 bytes: its 8 rows, each as 4 lanes times 8 inputs, whose pairs come in the order 0 2 1 3 (see
mega/product.cuh). mega/stream.cuh walks the result with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

UNIT = 8
BLOCK = 32
TILE_UNITS = 15
_ELEMENTS = UNIT * BLOCK
_PAIRS = (0, 2, 1, 3)
_SLICE_BYTES = 8 << 20
"""A matrix is packed in slices of about this size, so that a large one leaves room for another while it is packed."""


@dataclass(frozen=True)
class Layout:
    """How a bfloat16 matrix of `outputs` x `inputs` lies in the stream of `grid` SMs.

    `interleaved`: the matrix is two of equal height, one above the other, whose rows take turns in the stream.
    """

    outputs: int
    inputs: int
    grid: int
    interleaved: bool = False
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def units(self) -> int:
        """Groups of 8 outputs; the last one is filled up with zeros."""
        return -(-self.outputs // UNIT)

    @property
    def blocks(self) -> int:
        """Groups of 32 inputs."""
        return self.inputs // BLOCK

    @property
    def elements(self) -> int:
        """Of the packed matrix."""
        return self.units * self.blocks * _ELEMENTS

    @property
    def extra(self) -> int:
        """SMs that have one unit more than the others."""
        return self.units % self.grid

    def tiles(self) -> list[tuple[int, int]]:
        """First unit and number of units of every tile, rising."""
        found, first = [], 0
        for index in range(self.grid):
            count = self.units // self.grid + (index < self.extra)
            tiles = -(-count // TILE_UNITS)
            for tile in range(tiles):
                size = count // tiles + (tile < count % tiles)
                found.append((first, size))
                first += size
        return found

    def tile_mask(self) -> int:
        """Bit n - 1 is set when there are tiles of n units."""
        mask = 0
        for _, size in self.tiles():
            mask |= 1 << (size - 1)
        return mask

    def pack(self, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Write `weight` [outputs, inputs] to `out` [elements], on one device."""
        if self.interleaved:
            weight = weight.view(2, -1, self.inputs).transpose(0, 1)  # [outputs / 2, 2, inputs]
        for units in self._slices():
            step = 2 if self.interleaved else 1
            rows = weight[units.start * UNIT // step : units.stop * UNIT // step].reshape(-1, self.inputs)
            missing = len(units) * UNIT - len(rows)
            if missing:
                rows = torch.cat((rows, rows.new_zeros(missing, self.inputs)))
            pairs = rows.view(len(units), UNIT, self.blocks, 4, 4, 2)[..., list(_PAIRS), :]
            blocks = pairs.transpose(1, 2).reshape(-1, _ELEMENTS)
            out.view(-1, _ELEMENTS).index_copy_(0, self._place(units, out.device), blocks)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[outputs, inputs] from what `pack` wrote."""
        blocks = packed.view(-1, _ELEMENTS).index_select(0, self._place(range(self.units), packed.device))
        pairs = blocks.view(self.units, self.blocks, UNIT, 4, 4, 2)[..., list(_PAIRS), :]
        weight = pairs.transpose(1, 2).reshape(self.units * UNIT, self.inputs)[: self.outputs]
        if self.interleaved:
            weight = weight.view(-1, 2, self.inputs).transpose(0, 1).reshape(self.outputs, self.inputs)
        return weight

    def unit_table(self, device: torch.device) -> torch.Tensor:
        """[2, units] int32: first unit and number of units of each unit's tile."""
        if device not in self._tables:
            tiles = torch.tensor(self.tiles(), dtype=torch.int32)
            self._tables[device] = tiles.repeat_interleave(tiles[:, 1], dim=0).t().contiguous().to(device)
        return self._tables[device]

    def _slices(self) -> Iterator[range]:
        """All units in turn, as many at a time as are packed at once."""
        size = max(_SLICE_BYTES // (self.blocks * _ELEMENTS * 2), 1)
        for first in range(0, self.units, size):
            yield range(first, min(first + size, self.units))

    def _place(self, units: range, device: torch.device) -> torch.Tensor:
        """[len(units) * blocks] where each block of each of these units goes."""
        start, width = self.unit_table(device)[:, units.start : units.stop, None].long()
        unit = torch.arange(units.start, units.stop, device=device)[:, None]
        block = torch.arange(self.blocks, device=device)
        place: torch.Tensor = start * self.blocks + block * width + unit - start
        return place.flatten()
