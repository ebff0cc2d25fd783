"""Synthetic steps: logits in, destinations out, without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import settings

from algorithms.base import Algorithm, Definition, RouteContext, StepResult
from algorithms.registry import load, numeric_params, validate_params

torch.set_num_threads(1)

HIDDEN = 4

quick = settings(deadline=None, max_examples=50)
"""For property tests: no deadline, which a busy host would miss."""


def uniform_over(count: int, vocab: int) -> list[float]:
    """Logits whose softmax is uniform over the first `count` ids and exactly 0 elsewhere: entropy log(count)."""
    return [0.0] * count + [-math.inf] * (vocab - count)


def step(
    logits: Sequence[Sequence[float]] | torch.Tensor,
    params: Mapping[str, float | Sequence[float]],
    index: Sequence[int] | None = None,
    seed: Sequence[int] | None = None,
    choice: Sequence[int] | None = None,
) -> StepResult:
    """A step of greedy rows; parameters are one number for all rows or one per row."""
    table = torch.as_tensor(logits, dtype=torch.float32)
    rows = len(table)
    return StepResult(
        logits=table,
        hidden=torch.zeros(rows, HIDDEN),
        tokens=table.argmax(dim=-1),
        index=torch.tensor(index if index is not None else range(rows)),
        seed=torch.tensor(seed if seed is not None else [7] * rows),
        choice=torch.tensor(choice if choice is not None else [0] * rows),
        params={name: torch.tensor(value, dtype=torch.float32).expand(rows).clone() for name, value in params.items()},
        state=[{} for _ in range(rows)],
    )


def side(
    algorithm: str | Definition, params: Mapping[str, Any], index: int, models: int = 2, vocab: int = 8
) -> Algorithm:
    """One side of a route over `models` models."""
    definition = load(algorithm) if isinstance(algorithm, str) else algorithm
    route = tuple(f"m{number}" for number in range(models))
    context = RouteContext(route, index, vocab, HIDDEN, torch.device("cpu"))
    return definition.sides(index)(context, validate_params(definition, params, route))


def route(
    algorithm: str | Definition,
    params: Mapping[str, Any],
    index: int,
    logits: Sequence[Sequence[float]] | torch.Tensor,
    at: Sequence[int] | None = None,
    models: int = 2,
) -> list[int]:
    """Destinations that one side gives to rows of logits at the output indices `at`."""
    built = side(algorithm, params, index, models, len(logits[0]))
    destinations = built.route(step(logits, numeric_params(built.params), at))
    assert destinations.dtype == torch.int64
    assert destinations.shape == (len(logits),)
    return destinations.tolist()
