"""What the GPU's copy engine is told of a matrix, so that it fetches any box of it with one instruction."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from models.config import ModelError
from models.cuda.shares import BLOCK, UNIT, Shares

MAP_BYTES = 128
_ALIGNMENT = 64
_RANK = 5
_BFLOAT16, _NOT_INTERLEAVED, _SWIZZLED, _ZEROS = 9, 0, 3, 0
_FETCH_128_BYTES = 2
"""What a row of a box takes. Reading all weights of Qwen3-32B takes 13.75 ms on an H200 so, and 14.9 with 256 bytes."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """A stack of matrices in five dimensions, and the part of it that is copied at once: a chunk of a tile.

    Innermost first: 64 inputs, the 4 even or odd rows of a unit, even and odd, units, blocks of inputs. Where the halves of a
    matrix take turns, even rows are of the first half, odd ones of the second. So a box lies in shared memory as
    [blocks, units, 8 rows, 64 inputs], even rows first; of row r, the 16 bytes at n come to n xor r, so that the lanes of a warp,
    which read the same bytes of different rows, use different banks.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes, of all dimensions but the first."""
    box: tuple[int, ...]

    @classmethod
    def of(cls, stack: torch.Tensor, shares: Shares, units: int) -> Boxes:
        """Chunks of tiles of so many units.

        Args:
            stack: [layers, outputs, inputs] bfloat16, contiguous, a multiple of 8 outputs and at least those of `shares`.
            shares: how each matrix is dealt out.
            units: of a tile.
        """
        layers, outputs, inputs = stack.shape
        row = inputs * stack.itemsize
        own = outputs // UNIT
        layer = layer_units(stack, shares)
        even, parity, unit = (
            (row, own * UNIT // 2 * row, UNIT // 2 * row) if shares.interleaved else (2 * row, row, UNIT * row)
        )
        return cls(
            address=stack.data_ptr(),
            sizes=(BLOCK, UNIT // 2, 2, (layers - 1) * layer + own, inputs // BLOCK),
            strides=(even, parity, unit, BLOCK * stack.itemsize),
            box=(BLOCK, UNIT // 2, 2, units, shares.step(units)),
        )

    def encode(self) -> bytes:
        """The `MAP_BYTES` that the engine takes. Raises ModelError: the driver does not make them."""
        try:
            make = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        except (OSError, AttributeError) as error:
            raise ModelError(f"the megakernel needs a CUDA driver of version 12 or newer: {error}") from error
        memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
        offset = -ctypes.addressof(memory) % _ALIGNMENT
        wide, narrow = ctypes.c_uint64, ctypes.c_uint32
        code = make(
            ctypes.c_void_p(ctypes.addressof(memory) + offset),
            ctypes.c_int(_BFLOAT16),
            narrow(_RANK),
            ctypes.c_void_p(self.address),
            (wide * _RANK)(*self.sizes),
            (wide * (_RANK - 1))(*self.strides),
            (narrow * _RANK)(*self.box),
            (narrow * _RANK)(*(1,) * _RANK),
            ctypes.c_int(_NOT_INTERLEAVED),
            ctypes.c_int(_SWIZZLED),
            ctypes.c_int(_FETCH_128_BYTES),
            ctypes.c_int(_ZEROS),
        )
        if code:
            raise ModelError(f"the CUDA driver makes no tensor map of {self}: error {code}")
        return memory.raw[offset : offset + MAP_BYTES]


def layer_units(stack: torch.Tensor, shares: Shares) -> int:
    """From a layer's first unit to that of the next one, in the units of `Boxes`."""
    return stack.shape[1] // (UNIT // 2 if shares.interleaved else UNIT)
