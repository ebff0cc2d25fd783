"""Switch after a fixed number of tokens: a control for experiments, and the worst case of the hand-over path.

Rule, with t the output index and M models:
- shape "block" (keep family, M >= 2): token t is written by model (t div n) mod M. Each model hands directly to the next.
- shape "visit" (rewrite family, M = 2): token t is written by the peer when (t + 1) mod n = 0, by the entry otherwise; the
  entry's sample at such a position is dropped. n = 1 is the peer alone, with two hops a token.

With phases "seed" t is counted from where the seed says, (seed + choice) mod n, instead of from 0: requests that run side by side
switch at times of their own then, as those of other algorithms do. In common phases each of their batches is one that all join.

The index counts committed tokens, so that the writers are the same under any schedule. No published source.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from algorithms.base import MOST_MODELS, Algorithm, Definition, ReturnAfterOne, RouteContext, StepResult


class EveryNParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `every_n`."""

    shape: Annotated[
        Literal["block", "visit"],
        Meta(description="Runs of n tokens in turn, or one token of the peer at the end of every n."),
    ]
    n: Annotated[
        int,
        Meta(ge=1, le=1 << 24, description="Tokens between two switches; the largest value means never."),
    ]

    phases: Annotated[
        Literal["common", "seed"],
        Meta(description="Whether all requests count from their first token, or each from where its seed says."),
    ] = "common"


_LOW = (1 << 31) - 1
"""Bits of a seed that count."""


def _next_place(step: StepResult, phases: str) -> torch.Tensor:
    """[R] number of the position behind each row's token, counted from where the request's phase begins."""
    if phases == "common":
        return step.index + 1
    return step.index + 1 + ((step.seed + step.choice) & _LOW) % step.params["n"].long()


class EveryNEntry(Algorithm):
    """The entry in both shapes."""

    def __init__(self, context: RouteContext, params: EveryNParams) -> None:
        super().__init__(context, params)
        self.keep_sample = params.shape == "block"
        self.phases = params.phases

    def route(self, step: StepResult) -> torch.Tensor:
        """Block: who writes the next token. Visit: 1 at the last of every n positions."""
        if self.keep_sample:
            return block_destination(self.context, step, self.phases)
        return (_next_place(step, self.phases) % step.params["n"].long() == 0).long()


class EveryNPeer(ReturnAfterOne):
    """The other models: the next in turn for "block", back after one token for "visit"."""

    def __init__(self, context: RouteContext, params: EveryNParams) -> None:
        super().__init__(context, params)
        self.block = params.shape == "block"
        self.phases = params.phases

    def route(self, step: StepResult) -> torch.Tensor:
        """Block: who writes the next token. Visit: the entry."""
        return block_destination(self.context, step, self.phases) if self.block else super().route(step)


def block_destination(context: RouteContext, step: StepResult, phases: str) -> torch.Tensor:
    """[R] destination of the model that writes the position after each row's token."""
    turn = _next_place(step, phases).div(step.params["n"].long(), rounding_mode="floor") % len(context.models)
    away = turn + (turn < context.side)
    return away.masked_fill(turn == context.side, 0)


def _side(index: int) -> type[Algorithm]:
    return EveryNEntry if index == 0 else EveryNPeer


def _check(params: EveryNParams, models: tuple[str, ...]) -> None:
    if params.shape == "visit" and len(models) != 2:
        raise ValueError(f"shape: 'visit' takes exactly 2 models, the route has {len(models)}")


ALGORITHM = Definition("every_n", _side, EveryNParams, max_models=MOST_MODELS, check=_check)
