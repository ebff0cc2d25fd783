"""One token from two models' opinions of a position: the likeliest of a weighted mean of their distributions."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec
import torch


class Opinion(msgspec.Struct, array_like=True, frozen=True):
    """A model's likeliest tokens at one output index, falling."""

    index: int
    ids: list[int]
    log_probs: list[float]
    """Of the softmax over the whole vocabulary."""

    @classmethod
    def of(cls, logits: torch.Tensor, index: int, count: int) -> Opinion:
        """From [V] raw logits: the `count` likeliest tokens, or all there are."""
        best = logits.float().log_softmax(dim=-1).topk(min(count, len(logits)))
        return cls(index, best.indices.tolist(), best.values.tolist())


def likeliest(mine: Opinion, other: Opinion, share: float, banned: Collection[int]) -> int | None:
    """The token with the largest (1 - share) p_mine + share p_other; None if all are banned.

    A token that one of the two does not name counts as impossible to that one. Of equals the lowest id is taken.
    """
    weights: dict[int, float] = {}
    for opinion, weight in ((mine, 1.0 - share), (other, share)):
        for token, log_prob in zip(opinion.ids, opinion.log_probs, strict=True):
            weights[token] = weights.get(token, 0.0) + weight * math.exp(log_prob)
    return min((t for t in weights if t not in banned), key=lambda token: (-weights[token], token), default=None)
