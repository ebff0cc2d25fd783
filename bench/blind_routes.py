"""Routes as an external dispatcher decides them: by positions and draws alone, since servers return tokens and no logits.

Destinations are those of the route's own algorithm, for many positions at a time: asked token by token they would cost the
dispatcher as much as its calls do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from algorithms.base import StepResult
from algorithms.registry import AlgorithmError
from trouterd.config import Config
from trouterd.worker.answers import ask, param_rows
from trouterd.worker.decision import FAILED, checked
from trouterd.worker.request import Request
from trouterd.worker.route import ModelFacts, WorkerRoute, build_routes

Sides = Mapping[str, Sequence[WorkerRoute]]
"""By public name: the route as each of its models sees it."""
_CPU = torch.device("cpu")
_BLOCK = 256
"""Positions that are decided together."""


class Destinations:
    """Where one request goes after each of its tokens."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], Sequence[int]] = {}
        """By side and number of the block."""

    def after(self, request: Request) -> int:
        """Destination, seen from the model that has the request, after its next token; 0 = stay, or FAILED."""
        if not request.may_leave:
            return 0
        block, place = divmod(request.output_length, _BLOCK)
        key = request.route.side, block
        if key not in self._blocks:
            self._blocks[key] = _decided(request, block * _BLOCK)
        return self._blocks[key][place]


def blind_routes(config: Config, eos_ids: dict[str, frozenset[int]], vocab_size: int) -> Sides:
    """Every route and every single model, as each of its models sees it.

    Raises:
        AlgorithmError: an algorithm looks at more of a step than its position and the request's seed, choice and parameters.
    """
    facts = ModelFacts(vocab_size, hidden_size=0, device=_CPU)
    built = {name: build_routes(config, name, facts, eos_ids) for name in config.models}
    sides = {name: [built[model][name] for model in route.models] for name, route in config.all_routes().items()}
    for name, route_sides in sides.items():
        for side in route_sides:
            _require_blind(name, side)
    return sides


def _decided(request: Request, first: int) -> Sequence[int]:
    """Destinations after the tokens from output index `first` on."""
    route = request.route
    sampling = request.submit.sampling
    seed = torch.tensor([sampling.seed], dtype=torch.uint64).view(torch.int64).expand(_BLOCK)
    index = torch.arange(first, first + _BLOCK)
    step = _blind_step(index, index, seed, sampling.choice, param_rows([request] * _BLOCK, _CPU))
    answers = ask(route, route.algorithm.route, step, _BLOCK)
    return [checked(route, int(answer)) for answer in answers] if answers else [FAILED] * _BLOCK


def _blind_step(
    tokens: torch.Tensor, index: torch.Tensor, seed: torch.Tensor, choice: int, params: dict[str, torch.Tensor]
) -> StepResult:
    """A step of which nothing is known that depends on a model: asking for it raises AttributeError, and tokens are any."""
    rows = len(index)
    nothing = torch.empty(rows, 0)
    step = StepResult(
        logits=nothing,
        hidden=nothing,
        tokens=tokens,
        index=index,
        seed=seed,
        choice=torch.full((rows,), choice),
        params=params,
        state=[],
    )
    del step.logits, step.hidden, step.state
    return step


def _require_blind(name: str, side: WorkerRoute) -> None:
    what = "" if side.algorithm.pure else "keeps state of requests"
    index = torch.arange(_BLOCK)
    params = {key: torch.full((_BLOCK,), value, dtype=torch.float32) for key, value in side.params.items()}
    try:
        one, other = (
            side.algorithm.route(_blind_step(tokens, index, index, 0, params)) for tokens in (index, index + 1)
        )
        if not torch.equal(one, other):
            what = "looks at a step's tokens"
    except AttributeError as error:
        what = f"looks at a step's {error.name}"
    if what:
        raise AlgorithmError(
            f"routes.{name}.algorithm: an external dispatcher cannot decide for {side.definition.name!r}, which {what};"
            " draw its decisions, as bernoulli does"
        )
