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
_BFLOAT16, _AS_IT_IS, _ZEROS = 9, 0, 0
_FETCH_128_BYTES = 2
"""A row of a box is 64 bytes, and the next box of the same SM has the 64 behind it. Reading all weights of Qwen3-32B took 13.95 ms
on an H200 so, 14.7 with 256 bytes, and 15.5 with 64."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """A stack of matrices in five dimensions, and the part of it that is copied at once: a chunk of a tile.

    Innermost first: 32 inputs, 2 rows of a pair, pairs of rows, blocks of inputs, layers. So a box lies in shared memory as
    [blocks, rows, 32 inputs]. A pair is two neighbouring rows, or one of each half where the halves take turns.
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
            stack: [layers, outputs, inputs] bfloat16, contiguous, at least as many outputs as `shares` has, an even number.
            shares: how each matrix is dealt out.
            units: of a tile.
        """
        layers, outputs, inputs = stack.shape
        row = inputs * stack.itemsize
        pair = (outputs // 2 * row, row) if shares.interleaved else (row, 2 * row)
        return cls(
            address=stack.data_ptr(),
            sizes=(BLOCK, 2, outputs // 2, inputs // BLOCK, layers),
            strides=(*pair, BLOCK * stack.itemsize, outputs * row),
            box=(BLOCK, 2, units * UNIT // 2, shares.step(units), 1),
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
            ctypes.c_int(_AS_IT_IS),
            ctypes.c_int(_AS_IT_IS),
            ctypes.c_int(_FETCH_128_BYTES),
            ctypes.c_int(_ZEROS),
        )
        if code:
            raise ModelError(f"the CUDA driver makes no tensor map of {self}: error {code}")
        return memory.raw[offset : offset + MAP_BYTES]
