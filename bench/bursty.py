"""A routing algorithm whose hand-overs come in bursts: stretches of positions with many of them, and stretches with few.

Loaded by path, as any algorithm of a user: bench.delayed runs it against the throughput model's assumption of geometric runs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from algorithms.base import Algorithm, Definition, ReturnAfterOne, StepResult
from models.rng import Purpose, uniform_tensor

_APART = 1 << 24
"""Between the indices of the two draws."""


class BurstyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters."""

    stretch: Annotated[int, Meta(ge=1, le=4096, description="Positions of a stretch.")] = 16
    share: Annotated[float, Meta(ge=0, le=1, description="Of the stretches with many hand-overs.")] = 0.32
    many: Annotated[float, Meta(ge=0, le=1, description="Probability of a hand-over in these.")] = 0.9
    few: Annotated[float, Meta(ge=0, le=1, description="And in the others.")] = 0.1


class BurstyEntry(Algorithm):
    """The entry."""

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where the position's own draw is below the probability of its stretch."""
        stretch = step.index.div(step.params["stretch"].long(), rounding_mode="floor") + _APART
        dense = uniform_tensor(step.seed, step.choice, stretch, Purpose.ROUTE) < step.params["share"]
        odds = torch.where(dense, step.params["many"], step.params["few"])
        return (uniform_tensor(step.seed, step.choice, step.index, Purpose.ROUTE) < odds).long()


def _side(index: int) -> type[Algorithm]:
    return BurstyEntry if index == 0 else ReturnAfterOne


ALGORITHM = Definition("bursty", _side, BurstyParams)
