"""A routing algorithm whose decisions are drawn at given rates, while the head of a named one really runs at every step.

Random weights make a trained router decide anything. Here it decides nothing: its `route` is asked in the same place, on the same
rows and with its own parameters, so that its kernels are part of the step, and its answer is dropped.

Rule: the entry hands over with probability p a step, the peer hands back with probability q a step. Draws are keyed by (seed,
choice, output index); those of the two sides are independent. They are stratified: of every 256 output indices in a row, 256 p
are below p, give or take one, in an order that differs from block to block. So a measurement of some hundred tokens has the rate
that it is to have, where independent draws miss it by several percent; runs are as long as theirs. Whether the token of a step is
kept is up to the named algorithm's side: with R-Stitch the entry drops it and the peer keeps its own. Without a name nothing else
runs.

Loaded by path, as any algorithm of a user. The named one may be a path too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from algorithms.base import Algorithm, Definition, ReturnAfterOne, RouteContext, StepResult
from algorithms.drafting import Drafter
from algorithms.registry import AlgorithmError, load, numeric_params, validate_params
from models.rng import item_bits, item_bits_tensor, unit_tensor

_BITS = 8
_BLOCK = 1 << _BITS
"""Output indices that are drawn from together."""
_ORDER = sorted(range(_BLOCK), key=lambda item: item_bits(0, item))
"""Some permutation of a block without a pattern."""
_CHOICE = 40
"""Bits of a block's number."""


class DrawnParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters."""

    p: Annotated[float, Meta(ge=0, le=1, description="Share of the entry's steps that hand over.")]
    q: Annotated[
        float, Meta(ge=0, le=1, description="Share of the peer's steps that hand back; 1: after one token.")
    ] = 1.0
    head: Annotated[str, Meta(description="The algorithm that runs at every step, a name or a path; '' = none.")] = ""
    settings: Annotated[dict[str, Any], Meta(description="Its own parameters.")] = {}


class _Drawn(Algorithm):
    """What both sides have in common: the named algorithm's side, and being asked as it would be."""

    def __init__(self, context: RouteContext, params: DrawnParams) -> None:
        super().__init__(context, params)
        self._head = _side_of(params, context)
        self.keep_sample = context.side > 0
        self._order = torch.tensor(_ORDER, device=context.device)
        self._own: dict[str, torch.Tensor] = {}
        if self._head is not None:
            self.keep_sample, self.pure = self._head.keep_sample, self._head.pure
            numbers = numeric_params(self._head.params)
            self._own = {name: torch.tensor(value, device=context.device) for name, value in numbers.items()}

    def _uniform(self, step: StepResult) -> torch.Tensor:
        """[R] float64 in [0, 1): over a block of output indices, one in each of its equal parts."""
        block = (step.index >> _BITS) * 2 + (self.context.side > 0)
        bits = item_bits_tensor(step.seed, (step.choice << _CHOICE) + block)
        last = _BLOCK - 1
        place = self._order[(step.index ^ bits) & last]
        part = self._order[(place + (bits >> _BITS)) & last] ^ ((bits >> 2 * _BITS) & last)
        return (part + unit_tensor(bits)) / _BLOCK

    def _run_head(self, step: StepResult) -> None:
        if self._head is not None:
            rows = len(step.tokens)
            self._head.route(replace(step, params={name: value.expand(rows) for name, value in self._own.items()}))


class DrawnEntry(_Drawn):
    """Hands over with probability p."""

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where u < p."""
        self._run_head(step)
        return (self._uniform(step) < step.params["p"]).long()


class DrawnPeer(_Drawn):
    """Hands back with probability q."""

    def route(self, step: StepResult) -> torch.Tensor:
        """The entry where u < q."""
        self._run_head(step)
        return (self._uniform(step) < step.params["q"]) * self.context.destination(0)


def _side_of(params: DrawnParams, context: RouteContext) -> Algorithm | None:
    """The named algorithm's side; None where there is nothing to run."""
    if not params.head:
        return None
    definition = load(params.head)
    side = definition.sides(context.side)
    if side is ReturnAfterOne:
        return None
    return side(context, validate_params(definition, params.settings, context.models))


def _check(params: DrawnParams, models: tuple[str, ...]) -> None:
    if not params.head:
        return
    try:
        definition = load(params.head)
        validate_params(definition, params.settings, models)
    except AlgorithmError as error:
        raise ValueError(f"{'settings' if error.key else 'head'}: {error}") from error
    if issubclass(definition.sides(0), Drafter):
        raise ValueError(f"head: {params.head} drafts; there is no decision of its own to draw")


def _side(index: int) -> type[Algorithm]:
    return DrawnEntry if index == 0 else DrawnPeer


ALGORITHM = Definition("drawn", _side, DrawnParams, check=_check)
