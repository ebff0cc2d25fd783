"""How unsure a model is of its next token: measures of the softmax of raw logits, float32, without a probability tensor."""

from __future__ import annotations

import math

import torch

_UNDERFLOW = -104.0
"""exp() of this is zero in float32; the clamp keeps masked logits (-inf) from turning 0 * inf into NaN."""


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """[R] entropy in nats of [R, V] raw logits, in [0, log V].

    With m = max x and Z = sum e^(x-m): H = log Z - (1/Z) sum (x-m) e^(x-m). Every term is of one sign, so that H is never
    negative and exactly 0 for a distribution that is all on one token.
    """
    shifted = (logits.float() - logits.amax(dim=-1, keepdim=True)).clamp_(min=_UNDERFLOW)
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    return total.log() - (weights * shifted).sum(dim=-1) / total


def normalized_entropy(logits: torch.Tensor) -> torch.Tensor:
    """[R] entropy / log V of [R, V] raw logits, in [0, 1]; rounding never lifts it above 1."""
    return (entropy(logits) / math.log(logits.shape[-1])).clamp_(max=1.0)


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """[R] probability of the likeliest token, in (0, 1]."""
    values = logits.float()
    return (values.amax(dim=-1) - values.logsumexp(dim=-1)).exp()


def margin(logits: torch.Tensor) -> torch.Tensor:
    """[R] probability of the likeliest token minus that of the second, in [0, 1]."""
    values = logits.float()
    best = (values.topk(2, dim=-1).values - values.logsumexp(dim=-1, keepdim=True)).exp()
    return best[:, 0] - best[:, 1]
