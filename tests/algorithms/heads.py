"""Files of trained heads in the formats of their papers' code, with random weights, and the same heads in double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

Score = Callable[[torch.Tensor], float]
"""[H] hidden state -> probability."""


class ConfidenceNet(nn.Module):
    """CITER's head, layer by layer; its state dict has the official names."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        wide = 2 * hidden
        self.mlp = nn.Sequential(
            nn.Linear(hidden, wide),
            nn.BatchNorm1d(wide),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(wide, hidden),
            nn.Dropout(0.1),
        )
        self.linear = nn.Linear(hidden, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R] confidences."""
        return self.linear(self.mlp(hidden)).sigmoid().squeeze(-1)


def confidence_net(hidden: int, seed: int = 0) -> ConfidenceNet:
    """Random weights and statistics; confidences spread over most of (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    net = ConfidenceNet(hidden).eval()
    with torch.no_grad():
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (tensor.shape[-1] ** -0.5))
        norm = net.mlp[1]
        norm.running_var.copy_(torch.rand(norm.running_var.shape, generator=generator) + 0.1)
        norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
        norm.running_mean.mul_(2)
        net.linear.weight.mul_(4)
    return net


def write_confidence(path: Path, net: ConfidenceNet) -> Score:
    """A bare state dict; the head itself."""
    torch.save(net.state_dict(), path)
    exact = ConfidenceNet(net.linear.in_features).double().eval()
    exact.load_state_dict(net.state_dict())

    def score(hidden: torch.Tensor) -> float:
        with torch.no_grad():
            return float(exact(hidden.double()[None]))

    return score


def write_defer(path: Path, hidden: int, seed: int = 0, bias: float | None = None) -> Score:
    """A safetensors file with one row; the head itself."""
    row = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed))
    tensors = {"defer.weight": row}
    if bias is not None:
        tensors["defer.bias"] = torch.tensor([bias])
    save_file(tensors, path)
    return lambda h: float((h.double() @ row[0].double() + (bias or 0.0)).sigmoid())
