"""Probability mass as integers: exp(y) of logits y <= 0 under the largest one, in units of 2**-42.

Sums of floats depend on their order, and exp on who computes it. A cut at a share of the mass would then fall elsewhere on
another device now and then. These integers are the same bits everywhere and may be summed in any order: less than 2**21 of
them fit int64. Relative to exp they are less than 7e-8 off, as by the rounding of float32, and rounded down to units.
"""

from __future__ import annotations

import torch

UNIT_BITS = 42
"""exp(0) is 2**UNIT_BITS."""
STEP_BITS = 24
"""The exponent, -y * log2(e), is rounded down to multiples of 2**-STEP_BITS."""
STEPS_PER_NAT = round(2**28 * 1.4426950408889634) / 2.0 ** (28 - STEP_BITS)
"""29 significant bits: its product with a float32 is exact in float64."""
MOST_STEPS = float(63 << STEP_BITS)
"""From here on the mass is 0."""
FACTOR_BITS = 30
FACTORS = (1073741824, 744260973, 257938912, 59582935, 10286296, 1369601, 117391)
"""2**-f for 0 <= f < 1 as a polynomial, a0 - f * (a1 - f * (a2 - ...)), in units of 2**-FACTOR_BITS; at most 1e-8 off."""


def mass(heights: torch.Tensor) -> torch.Tensor:
    """int64 masses of float32 heights y <= 0, -inf included."""
    steps = (heights.double() * -STEPS_PER_NAT).clamp_(max=MOST_STEPS).long()
    fraction = steps & ((1 << STEP_BITS) - 1)
    result = torch.full_like(steps, FACTORS[-1])
    for factor in FACTORS[-2::-1]:
        result.mul_(fraction).bitwise_right_shift_(STEP_BITS).neg_().add_(factor)
    return result.bitwise_left_shift_(UNIT_BITS - FACTOR_BITS).bitwise_right_shift_(
        steps.bitwise_right_shift_(STEP_BITS)
    )


def share(part: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The least int64 mass that is at least `part` (float32) of `total`."""
    return (part.double() * total.double()).ceil_().long()
