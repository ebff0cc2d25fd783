"""Switch after a fixed number of tokens: a control for experiments, and the worst case of the hand-over path.

Rule, with t the output index and M models:
- shape "block" (keep family, M >= 2): token t is written by model (t div n) mod M. Each model hands directly to the next.
- shape "visit" (rewrite family, M = 2): token t is written by the peer when (t + 1) mod n = 0, by the entry otherwise; the
  entry's sample at such a position is dropped. n = 1 is the peer alone, with two hops a token.

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


class EveryNEntry(Algorithm):
    """The entry in both shapes."""

    def __init__(self, context: RouteContext, params: EveryNParams) -> None:
        super().__init__(context, params)
        self.keep_sample = params.shape == "block"

    def route(self, step: StepResult) -> torch.Tensor:
        """Block: who writes the next token. Visit: 1 at the last of every n positions."""
        if self.keep_sample:
            return block_destination(self.context, step)
        return ((step.index + 1) % step.params["n"].long() == 0).long()


class EveryNPeer(ReturnAfterOne):
    """The other models: the next in turn for "block", back after one token for "visit"."""

    def __init__(self, context: RouteContext, params: EveryNParams) -> None:
        super().__init__(context, params)
        self.block = params.shape == "block"

    def route(self, step: StepResult) -> torch.Tensor:
        """Block: who writes the next token. Visit: the entry."""
        return block_destination(self.context, step) if self.block else super().route(step)


def block_destination(context: RouteContext, step: StepResult) -> torch.Tensor:
    """[R] destination of the model that writes the position after each row's token."""
    turn = (step.index + 1).div(step.params["n"].long(), rounding_mode="floor") % len(context.models)
    away = turn + (turn < context.side)
    return away.masked_fill(turn == context.side, 0)


def _side(index: int) -> type[Algorithm]:
    return EveryNEntry if index == 0 else EveryNPeer


def _check(params: EveryNParams, models: tuple[str, ...]) -> None:
    if params.shape == "visit" and len(models) != 2:
        raise ValueError(f"shape: 'visit' takes exactly 2 models, the route has {len(models)}")


ALGORITHM = Definition("every_n", _side, EveryNParams, max_models=MOST_MODELS, check=_check)
