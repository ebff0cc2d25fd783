"""Inputs of unlike scales: standardised while a head learns, folded into its first matrices when it is saved."""

from __future__ import annotations

import torch
from torch import nn


class Standard(nn.Module):
    """Rows to mean 0 and deviation 1, by the rows that it was made from.

    Args:
        rows: [N, W]
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", rows.mean(0))
        self.register_buffer("deviation", rows.std(0, correction=0).clamp(min=1e-4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, W] standardised."""
        return (rows - self.mean) / self.deviation

    def folded(self, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight [O, W] and bias [O] of the map that does on plain rows what the given one does on standardised ones."""
        return fold(weight, bias, self.mean, self.deviation)


def fold(
    weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """W' and b' with W' x + b' = W (x - mean) / deviation + b, worked out in float64."""
    wide = weight.double() / deviation.double()
    return wide.to(weight.dtype), (bias.double() - wide @ mean.double()).to(bias.dtype)
