"""How the megakernel deals a matrix out: to SMs, to tiles of each SM, and to chunks of a tile.

A matrix [N, K] is cut into units of 8 outputs and blocks of 64 inputs. Every SM gets one run of units, all of about the same
length; a run is cut into tiles of up to 15 units, a tile into chunks of some blocks. mega/stream.cuh walks the matrix with the
same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT = 8
BLOCK = 64
TILE_UNITS = 15
WARPS = 8
"""That share the chunks of a tile."""
BLOCK_BYTES = UNIT * BLOCK * 2
STAGE_BYTES = TILE_UNITS * BLOCK_BYTES
"""Of a chunk at most: one block of the largest tile."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a bfloat16 matrix of `outputs` x `inputs`, dealt to `grid` SMs.

    `interleaved`: the matrix is two of equal height, one above the other, whose rows take turns in the units.
    """

    outputs: int
    inputs: int
    grid: int
    interleaved: bool = False

    @property
    def units(self) -> int:
        """Groups of 8 outputs; the last one may be a part of one."""
        return -(-self.outputs // UNIT)

    @property
    def blocks(self) -> int:
        """Groups of 64 inputs."""
        return self.inputs // BLOCK

    @property
    def extra(self) -> int:
        """SMs that have one unit more than the others."""
        return self.units % self.grid

    def tile_sizes(self) -> tuple[int, ...]:
        """Units that a tile can have, rising: three numbers at most."""
        found = set()
        for count in {self.units // self.grid, -(-self.units // self.grid)} - {0}:
            tiles = -(-count // TILE_UNITS)
            found |= {count // tiles, -(-count // tiles)}
        return tuple(sorted(found))

    def tile_mask(self) -> int:
        """Bit n - 1 is set when there are tiles of n units."""
        return sum(1 << (size - 1) for size in self.tile_sizes())

    def step(self, units: int) -> int:
        """Blocks of a chunk of such a tile: as many as fit into a stage, but so that all warps get the same number of chunks."""
        most = STAGE_BYTES // (units * BLOCK_BYTES)
        chunks = -(-self.blocks // (WARPS * most))
        return -(-self.blocks // (WARPS * chunks))
