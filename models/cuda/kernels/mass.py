"""`models.mass` on a GPU, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

from models.mass import FACTOR_BITS, FACTORS, MOST_STEPS, STEP_BITS, STEPS_PER_NAT, UNIT_BITS

_STEP_BITS = tl.constexpr(STEP_BITS)
_FRACTION = tl.constexpr((1 << STEP_BITS) - 1)
_STEPS_PER_HEIGHT = tl.constexpr(-STEPS_PER_NAT)
_MOST_STEPS = tl.constexpr(MOST_STEPS)
_GROWTH = tl.constexpr(UNIT_BITS - FACTOR_BITS)
_A0, _A1, _A2, _A3, _A4, _A5, _A6 = (tl.constexpr(factor) for factor in FACTORS)


@triton.jit
def _less(factor, rest, fraction):
    return factor - ((rest * fraction) >> _STEP_BITS)


@triton.jit
def mass(heights):
    """int64 masses of float64 heights y <= 0 that float32 can hold."""
    steps = tl.minimum(heights * _STEPS_PER_HEIGHT, _MOST_STEPS).to(tl.int64)
    fraction = steps & _FRACTION
    result = _less(_A5, _A6, fraction)
    result = _less(_A4, result, fraction)
    result = _less(_A3, result, fraction)
    result = _less(_A2, result, fraction)
    result = _less(_A1, result, fraction)
    result = _less(_A0, result, fraction)
    return (result << _GROWTH) >> (steps >> _STEP_BITS)


@triton.jit
def share(part, total):
    """The least mass that is at least `part` (float32) of `total`."""
    return tl.ceil(part.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
