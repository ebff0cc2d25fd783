"""Hand over a random share of the tokens: a control for experiments with the shape of a learned router.

Rule: with u(t) uniform in [0, 1) and keyed by (seed, choice, output index t), the entry hands over when u(t) < p; its sample
is dropped, the peer writes that position and goes back (rewrite family). p = 0 never hands over, p = 1 always does. Gaps
between two visits are geometric, which is the assumption of throughput models of token routing (arXiv 2610.12242).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from algorithms.base import Algorithm, Definition, ReturnAfterOne, StepResult
from models.rng import Purpose, uniform_tensor


class BernoulliParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `bernoulli`."""

    p: Annotated[float, Meta(ge=0, le=1, description="Share of the tokens that the peer writes.")]


class BernoulliEntry(Algorithm):
    """The entry: each position goes to the peer with probability p."""

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where u < p."""
        return (uniform_tensor(step.seed, step.choice, step.index, Purpose.ROUTE) < step.params["p"]).long()


def _side(index: int) -> type[Algorithm]:
    return BernoulliEntry if index == 0 else ReturnAfterOne


ALGORITHM = Definition("bernoulli", _side, BernoulliParams)
