"""A user's algorithm, loaded by path: any model may hand to any other, and each keeps or drops its sample as it is told.

It visits what no built-in does: direct hops that drop the sample, models that pass a position on without writing, and pairs
that would hand it back and forth for ever.
"""

from __future__ import annotations

import msgspec

from algorithms.base import Algorithm, Definition, RouteContext, TokenView
from models.rng import Purpose, uniform


class WanderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keep: tuple[bool, ...]
    """Per model of the route: keep the sample."""
    restless: float
    """Probability of naming another writer."""


class Wander(Algorithm):
    def __init__(self, context: RouteContext, params: WanderParams) -> None:
        super().__init__(context, params)
        self.keep_sample = params.keep[context.side]

    def decide(self, token: TokenView) -> int:
        draw = uniform(token.seed, token.choice, token.index, Purpose.USER + self.context.side)
        restless = token.params["restless"]
        others = len(self.context.models) - 1
        return 1 + int(draw / restless * others) if draw < restless else 0


ALGORITHM = Definition("wander", lambda _: Wander, WanderParams, min_models=1, max_models=8)
