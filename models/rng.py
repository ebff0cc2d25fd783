"""Counter-based random numbers: each value is a pure function of (seed, choice, output index, purpose, item).

A key is a SplitMix64 stream folded over its parts, so that a draw never depends on batch mates, on the schedule or on
the model that makes it. Plain Python, numpy and torch forms of the one definition agree bit for bit; negative seeds
and signed tensors stand for their two's complement value.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_TO_UNIT = 2.0**-53

UInt64Array = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a draw is for: draws of one output index for different purposes are independent."""

    SAMPLE = 0
    ROUTE = 1
    USER = 64
    """First number free for algorithms of one's own."""


def _mix(value: int) -> int:
    value = ((value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> _SHIFTS[2])


def key(seed: int, choice: int, output_index: int, purpose: int) -> int:
    """The 64-bit key of one draw; `item_bits` of it gives independent numbers per vocabulary id."""
    value = 0
    for part in (seed, choice, output_index, purpose):
        value = _mix((value + _GOLDEN * ((part & _MASK) + 1)) & _MASK)
    return value


def item_bits(key: int, item: int) -> int:
    """64 random bits of one item (such as a vocabulary id) under a key."""
    return _mix((key + _GOLDEN * (item + 1)) & _MASK)


def uniform(seed: int, choice: int, output_index: int, purpose: int) -> float:
    """One float64 in [0, 1)."""
    return (key(seed, choice, output_index, purpose) >> 11) * _TO_UNIT


def _mix_array(value: UInt64Array) -> UInt64Array:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(multiplier)
    return value ^ (value >> np.uint64(_SHIFTS[2]))


def key_array(seed: npt.ArrayLike, choice: npt.ArrayLike, output_index: npt.ArrayLike, purpose: int) -> UInt64Array:
    """`key` over broadcast integer arrays; seeds are uint64 or int64."""
    parts = np.broadcast_arrays(*(_unsigned(part) for part in (seed, choice, output_index, purpose)))
    value = np.zeros(parts[0].shape, np.uint64)
    for part in parts:
        value = _mix_array(value + np.uint64(_GOLDEN) * (part + np.uint64(1)))
    return value


def _unsigned(part: npt.ArrayLike) -> UInt64Array:
    array = np.atleast_1d(np.asarray(part))
    return array if array.dtype == np.uint64 else array.astype(np.int64).view(np.uint64)


def uniform_array(
    seed: npt.ArrayLike, choice: npt.ArrayLike, output_index: npt.ArrayLike, purpose: int
) -> npt.NDArray[np.float64]:
    """`uniform` over broadcast integer arrays (at least one-dimensional)."""
    return (key_array(seed, choice, output_index, purpose) >> np.uint64(11)).astype(np.float64) * _TO_UNIT


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask clears the copies of the sign.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(value: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        value = (value ^ _shift_right(value, shift)) * _signed(multiplier)
    return value ^ _shift_right(value, _SHIFTS[2])


def key_tensor(
    seed: torch.Tensor, choice: torch.Tensor, output_index: torch.Tensor, purpose: torch.Tensor | int
) -> torch.Tensor:
    """`key` over int64 tensors of one shape; the result holds the same 64 bits as int64."""
    value = torch.zeros_like(seed)
    for part in (seed, choice, output_index, purpose):
        if isinstance(part, int):
            value = _mix_tensor(value + _signed((part + 1) * _GOLDEN & _MASK))
        else:
            value = _mix_tensor(value + (part + 1) * _signed(_GOLDEN))
    return value


def item_bits_tensor(keys: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """`item_bits`, broadcast over int64 tensors."""
    return _mix_tensor(keys + (items + 1) * _signed(_GOLDEN))


def unit_tensor(bits: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1) of 64 random bits held as int64."""
    return _shift_right(bits, 11).double() * _TO_UNIT


def uniform_tensor(
    seed: torch.Tensor, choice: torch.Tensor, output_index: torch.Tensor, purpose: torch.Tensor | int
) -> torch.Tensor:
    """`uniform` over int64 tensors of one shape."""
    return unit_tensor(key_tensor(seed, choice, output_index, purpose))
