"""Router checkpoints with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from algorithms.r2r_router import save


@dataclass(frozen=True)
class Sizes:
    """Of a router and its model."""

    hidden: int
    width: int = 128
    blocks: int = 2
    expansion: int = 4
    top: int = 100
    normalize: bool = False
    last: int | None = None
    """Width of the last block, if it is another one."""


def router_file(path: Path, sizes: Sizes, threshold: float) -> Path:
    """Write one whose probabilities spread."""
    generator = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}

    def linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        state[f"{name}.weight"] = torch.randn((outputs, inputs), generator=generator) * gain * inputs**-0.5
        state[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.1

    def norm(name: str, width: int) -> None:
        state[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) * 0.1
        state[f"{name}.bias"] = torch.randn(width, generator=generator) * 0.1

    widths = [sizes.width] * sizes.blocks
    widths[-1] = sizes.last or sizes.width
    linear("logits_projection", sizes.hidden, sizes.top)
    linear("combined_projection", sizes.width, 3 * sizes.hidden)
    linear("backbone.input_projection", sizes.width, sizes.width)
    for index, (before, after) in enumerate(zip(widths, [*widths[1:], widths[-1]], strict=True)):
        block = f"backbone.blocks.{index}"
        norm(f"{block}.layer_norm", before)
        linear(f"{block}.mlp.0", before * sizes.expansion, before)
        linear(f"{block}.mlp.3", after, before * sizes.expansion)
        if before != after:
            linear(f"{block}.dim_change", after, before)
    norm("backbone.output_layer.0", widths[-1])
    linear("backbone.output_layer.1", 1, widths[-1], gain=2.0)
    if sizes.normalize:
        norm("layer_norm_hidden_states", sizes.hidden)
        norm("layer_norm_token", sizes.hidden)
    args = {
        "hidden_states_size": sizes.hidden,
        "logits_size": sizes.top,
        "hidden_dims": widths,
        "expansion_factor": sizes.expansion,
        "normalize_input": sizes.normalize,
    }
    save(path, state, args, threshold)
    return path
