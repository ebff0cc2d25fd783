"""Counter-based noise of `models.rng` and `models.sampler.gumbel_argmax` on a GPU: the exact form and a fast one."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_LARGEST = tl.constexpr((1 << 53) - 1)
_UNIT = tl.constexpr(2.0**-53)
_HALF_UNIT = tl.constexpr(2.0**-54)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    return value ^ (value >> 31)


@triton.jit
def _stirred(value, part):
    return _mix(value + (part + 1) * _GOLDEN)


@triton.jit
def draw_key(seed_low, seed_high, choice, index):
    """`rng.key` for the purpose SAMPLE, as uint64."""
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    value = _mix((seed + 1) * _GOLDEN)
    value = _stirred(value, choice.to(tl.int64).to(tl.uint64))
    value = _stirred(value, index.to(tl.int64).to(tl.uint64))
    return _mix(value + _GOLDEN)


@triton.jit
def _bits(key, ids):
    """53 random bits of each id, as int64."""
    return (_stirred(key, ids.to(tl.uint64)) >> 11).to(tl.int64)


@triton.jit
def exact_noise(key, ids):
    """log E of `gumbel_argmax` in float64."""
    unit = _bits(key, ids).to(tl.float64) * _UNIT + _HALF_UNIT
    rest = 1.0 - unit
    # log1p(-unit) without its own function: the rounding of `rest` cancels in the quotient.
    small = rest == 1.0
    exponential = tl.where(small, unit, -tl.log(rest) * (unit / tl.where(small, 1.0, 1.0 - rest)))
    return tl.log(exponential)


@triton.jit
def rough_noise(key, ids):
    """log E in float32, some 1e-6 off: enough to tell all but close scores apart."""
    bits = _bits(key, ids)
    unit = (bits.to(tl.float32) + 0.5) * _UNIT
    rest = ((bits ^ _LARGEST).to(tl.float32) + 0.5) * _UNIT
    small = rest == 1.0
    exponential = tl.where(small, unit, -tl.log(rest) * (unit / tl.where(small, 1.0, 1.0 - rest)))
    return tl.log(exponential)
