"""Rotary position embeddings in half-split form (arXiv 2104.09864), with the long-context variants.

linear: position interpolation (arXiv 2306.15595); yarn: arXiv 2309.00071; llama3: the Llama 3.1 release. "dynamic" is
left out on purpose: its frequencies change with the length of a sequence, so keys already in KV would be wrong.
"""

from __future__ import annotations

import math

import torch

from models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32 radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    if rope.kind == "yarn":
        return _yarn(inverse, rope, head_dim)
    return inverse


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except for yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def rotary_table(rope: RopeConfig, head_dim: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """[length, 2, 1, head_dim] cos and sin of every position, each half repeated, in `dtype`."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor(rope)
    # The sign of rotate_half's first half, folded into sin once here instead of into x at every step.
    table[:, 1, : head_dim // 2].neg_()
    return table.to(dtype)[:, :, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] turned by its positions' `rotary_table` rows, cos and sin [T, 1, head_dim]."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def _llama3(inverse: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    rotations = rope.original_context * inverse / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def _yarn(inverse: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn seldom interpolated, with a linear ramp between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
