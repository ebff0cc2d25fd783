"""How unsure a model is of its next token: measures of the softmax of raw logits, float32, without a probability tensor."""

from __future__ import annotations

import math

import torch

from models.cuda.router_head import largest

LOG_U_TOP = 10
"""Logits that the log-U measures look at."""
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


def aleatoric(logits: torch.Tensor) -> torch.Tensor:
    """[R] log-U's aleatoric uncertainty of [R, V] raw logits: how evenly the evidence is spread.

    With x_1 ... x_K the K = 10 largest logits, those below 0 taken as 0 (no evidence), S their sum and psi the digamma function:
    AU = -sum (x_k / S) (psi(x_k + 1) - psi(S + 1)). Where there is no evidence at all it is 0.
    """
    evidence = _evidence(logits)
    total = evidence.sum(dim=-1, keepdim=True)
    shares = evidence / total.clamp(min=torch.finfo(torch.float32).tiny)
    return (shares * (torch.digamma(total + 1) - torch.digamma(evidence + 1))).sum(dim=-1)


def epistemic(logits: torch.Tensor) -> torch.Tensor:
    """[R] log-U's epistemic uncertainty of [R, V] raw logits, in (0, 1]: how little evidence there is. EU = K / (S + K)."""
    evidence = _evidence(logits)
    count = evidence.shape[-1]
    return count / (evidence.sum(dim=-1) + count)


def _evidence(logits: torch.Tensor) -> torch.Tensor:
    """[R, K] the largest logits, none below 0."""
    return largest(logits.float(), min(LOG_U_TOP, logits.shape[-1])).clamp(min=0.0)
