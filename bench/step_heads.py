"""Routing algorithms for a bench of steps: at work on every row, and never of the opinion that a token should leave."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from algorithms.base import RouteContext, StepResult
from algorithms.r2r_router import save
from algorithms.registry import load, numeric_params, validate_params
from models.batch import ModelRunner
from models.resident import DeviceRoute, RoutedRows
from trouterd.training.r2r import EXPANSION, TOP, sizes

HEADS = ("none", "entropy", "r2r", "r2r-bfloat16", "citer", "collm")
_NEVER = {"entropy": 1e9, "r2r": 2.0, "citer": 0.0, "collm": 1.0}
"""Thresholds that nothing reaches."""


@dataclass(frozen=True, slots=True)
class Head:
    """A route for `Resident.set_routes`, and what its requests say of it."""

    route: DeviceRoute
    params: tuple[float, ...]
    bytes: int
    """Weights that it reads at every step."""


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """Sizes of what a head sees of its model."""

    hidden: int
    embedding: int
    """Width of a token's embedding."""
    vocabulary: int


def make_head(name: str, runner: ModelRunner, device: torch.device) -> Head | None:
    """A head with random weights for this model; None for "none"."""
    if name == "none":
        return None
    algorithm, _, dtype = name.partition("-")
    models = ("small", "large")
    context = RouteContext(models, 0, runner.vocab_size, runner.hidden_size, device, runner.embedding)
    definition = load(algorithm)
    settings: dict[str, object] = {"threshold": _NEVER[algorithm]}
    embedding = runner.hidden_size if runner.embedding is None else runner.embedding.shape[1]
    inputs = HeadInputs(runner.hidden_size, embedding, runner.vocab_size)
    weights = 0
    with tempfile.TemporaryDirectory() as folder:
        if algorithm in _WRITERS:
            path = Path(folder) / "head"
            weights = write_head(algorithm, path, inputs)
            settings |= {"checkpoint": str(path)} | ({"dtype": dtype} if dtype else {})
        params = validate_params(definition, settings, models)
        side = definition.sides(0)(context, params)

    def decide(rows: RoutedRows) -> torch.Tensor:
        return side.route(
            StepResult(
                logits=rows.logits,
                hidden=rows.hidden,
                tokens=rows.tokens,
                index=rows.index,
                seed=rows.seed,
                choice=rows.choice,
                params=rows.params,
                state=[],
            )
        )

    numbers = numeric_params(params)
    route = DeviceRoute(name, decide, tuple(numbers))
    return Head(route, tuple(numbers.values()), weights * (2 if dtype == "bfloat16" else 4))


def write_head(algorithm: str, path: Path, inputs: HeadInputs) -> int:
    """Write random weights in the shape that `trouterd train` gives a head; returns how many it reads at a step.

    Args:
        algorithm: "r2r", "citer" or "collm".
        path: the file, in the algorithm's format.
        inputs: of the small model.
    """
    return _WRITERS[algorithm](path, inputs)


def _write_router(path: Path, inputs: HeadInputs) -> int:
    """Random weights in the official format; how many the router reads (the three linear maps before its blocks are one).

    The published router (arXiv 2505.21600) has 55 million of them over a hidden size of 1,024, which beside a small model would be
    most of the step.
    """
    hidden, embedding = inputs.hidden, inputs.embedding
    width, count = sizes(hidden)
    wide = width * EXPANSION
    top = min(TOP, inputs.vocabulary)
    parts: dict[str, nn.Module] = {
        "logits_projection": nn.Linear(top, hidden),
        "combined_projection": nn.Linear(2 * hidden + embedding, width),
        "backbone.input_projection": nn.Linear(width, width),
        "backbone.output_layer.0": nn.LayerNorm(width),
        "backbone.output_layer.1": nn.Linear(width, 1),
    }
    for block in range(count):
        name = f"backbone.blocks.{block}"
        parts |= {
            f"{name}.layer_norm": nn.LayerNorm(width),
            f"{name}.mlp.0": nn.Linear(width, wide),
            f"{name}.mlp.3": nn.Linear(wide, width),
        }
    state = _state_dict(parts)
    arguments = {
        "hidden_states_size": hidden,
        "logits_size": top,
        "hidden_dims": [width] * count,
        "expansion_factor": EXPANSION,
    }
    save(path, state, arguments, 0.5)
    blocks: int = sum(value.numel() for name, value in state.items() if ".blocks." in name or ".output_layer." in name)
    return blocks + width * (hidden + embedding + top + 1)


def _write_confidence(path: Path, inputs: HeadInputs) -> int:
    """CITER's head in the official format; its maps behind the rectifier are read as one."""
    hidden, wide = inputs.hidden, 2 * inputs.hidden
    parts: dict[str, nn.Module] = {
        "mlp.0": nn.Linear(hidden, wide),
        "mlp.1": nn.BatchNorm1d(wide),
        "mlp.4": nn.Linear(wide, hidden),
        "linear": nn.Linear(hidden, 1),
    }
    torch.save(_state_dict(parts), path)
    return wide * (hidden + 2) + 1


def _write_defer(path: Path, inputs: HeadInputs) -> int:
    """Co-LLM's row."""
    save_file({"defer.weight": torch.randn(1, inputs.hidden)}, path)
    return inputs.hidden


def _state_dict(parts: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}


_WRITERS: dict[str, Callable[[Path, HeadInputs], int]] = {
    "r2r": _write_router,
    "citer": _write_confidence,
    "collm": _write_defer,
}
"""Write a head's file and count the weights that it reads at a step."""
