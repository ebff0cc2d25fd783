"""Hand over where the small model itself has learned to defer.

Rule: with P = sigmoid(d) of the deferral logit (see `defer_head`) at output index t, the entry hands over when P > eta_t; its
sample is dropped and the peer answers for that position (rewrite family). The first output token is routed too; at equality the
small model's token stays. eta_t is the threshold all along, or falls to it from 1 over the first W tokens:
    linear: 1 + (eta - 1) t / W    cosine: eta + (1 - eta) (1 + cos(pi t / W)) / 2    exponential: eta^(t / W)
Mode `defer`: the peer writes one token. Mode `compose`: it tells its likeliest tokens, and the entry writes the likeliest of
(1 - P) p_small + P p_large.
Source: Co-LLM, arXiv 2403.03870; d is taken from the raw hidden state, apart from the logits that tokens are drawn from.
Shapes: hidden [R, H], the LM head's input.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from algorithms.base import Algorithm, Definition, Handoff, OutputView, ReturnAfterOne, RouteContext, StepResult
from algorithms.defer_head import DeferHead
from algorithms.head_threshold import Threshold, choose, in_force, sidecar_threshold
from algorithms.mixture import Opinion, likeliest
from algorithms.registry import AlgorithmError

Schedule = Literal["constant", "linear", "cosine", "exponential"]

_FALLBACK = Threshold(
    0.5,
    "not calibrated: the official code's where it has searched for none (arXiv 2610.12242: 0.15 for a model of its own)",
)
_OPINION, _SHARE = "opinion", "share"
"""Keys of a request's state on either side."""


class CollmParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `collm`."""

    checkpoint: Annotated[
        str,
        Meta(
            description=(
                "A safetensors file with defer.weight and, if wanted, defer.bias; '' = the <|defer|> row of the entry"
                " model's own checkpoint."
            ),
        ),
    ] = ""
    threshold: Annotated[
        float,
        Meta(
            ge=-1,
            le=1,
            description=(
                "Probability of deferring above which the peer is asked; -1 = the one calibrated in <checkpoint>.json,"
                " else 0.5. 1 = never."
            ),
        ),
    ] = -1.0
    mode: Annotated[
        Literal["defer", "compose"],
        Meta(description="The peer writes the token, or the likeliest token of both models' mixture is written."),
    ] = "defer"
    schedule: Annotated[Schedule, Meta(description="How the threshold falls from 1 over the warm-up.")] = "constant"
    warmup: Annotated[int, Meta(ge=1, description="Output tokens of the warm-up; without effect if constant.")] = 15
    top: Annotated[int, Meta(ge=1, le=4096, description="compose: how many tokens each model names.")] = 64


def scheduled(threshold: torch.Tensor, index: torch.Tensor, warmup: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """[R] thresholds at output indices [R], from those that hold after the warm-up."""
    if schedule == "constant":
        return threshold
    done = (index / warmup).clamp(max=1.0)
    match schedule:
        case "linear":
            return 1.0 + (threshold - 1.0) * done
        case "cosine":
            return threshold + (1.0 - threshold) * (1.0 + (math.pi * done).cos()) / 2.0
        case "exponential":
            return threshold.pow(done)


class CollmEntry(Algorithm):
    """The small side: asks for the peer where its deferral row says so."""

    def __init__(self, context: RouteContext, params: CollmParams) -> None:
        super().__init__(context, params)
        self._head, self._default = _head(context, params)
        self._schedule = params.schedule
        self._composes = params.mode == "compose"
        if self._composes:
            self.pure = False

    def deferral(self, step: StepResult) -> torch.Tensor:
        """[R] float32 probability of deferring."""
        return self._head(step.hidden)

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where P > eta_t."""
        eta = in_force(step.params["threshold"], self._default)
        deferral = self.deferral(step)
        away = deferral > scheduled(eta, step.index, step.params["warmup"], self._schedule)
        if self._composes:
            shares = deferral.tolist()
            for row in away.nonzero().flatten().tolist():
                step.state[row] |= {_OPINION: _opinion(step, row), _SHARE: shares[row]}
        return away.long()

    def combine(self, request: OutputView, payload: bytes) -> int | None:
        """The likeliest token of the mixture; None if the peer speaks of another position."""
        mine, other = request.state.get(_OPINION), msgspec.msgpack.decode(payload, type=Opinion)
        if mine is None or not mine.index == other.index == request.output_length:
            return None
        return likeliest(mine, other, request.state[_SHARE], request.banned)


class CollmPeer(ReturnAfterOne):
    """The large side: writes one token, or says what it thinks of the position and leaves it to the entry."""

    def __init__(self, context: RouteContext, params: CollmParams) -> None:
        super().__init__(context, params)
        self._composes = params.mode == "compose"
        if self._composes:
            self.pure = self.keep_sample = False

    def route(self, step: StepResult) -> torch.Tensor:
        """Always back to the entry."""
        if self._composes:
            for row in range(len(step.tokens)):
                step.state[row][_OPINION] = _opinion(step, row)
        return super().route(step)

    def send(self, request: OutputView, model: int) -> Handoff:
        """With the opinion of the position that the entry is to write."""
        handoff = super().send(request, model)
        opinion = request.state.get(_OPINION)
        if opinion is None or opinion.index != request.output_length:
            return handoff
        return Handoff(handoff.start, handoff.loc, msgspec.msgpack.encode(opinion))


def _head(context: RouteContext, params: CollmParams) -> tuple[DeferHead, float]:
    """The head, and what a threshold below 0 means. Raises AlgorithmError."""
    if params.checkpoint:
        path = Path(params.checkpoint)
        head = DeferHead.load(path, "checkpoint", context)
        calibrated = sidecar_threshold(path, "checkpoint", context.hidden_size, ("collm",))
        return head, choose("collm", params.threshold, calibrated, _FALLBACK)
    if context.defer is None:
        raise AlgorithmError(
            f"checkpoint: set it to a file with defer.weight: model '{context.models[0]}' has no <|defer|> row of its own",
            "checkpoint",
        )
    return DeferHead(context.defer), choose("collm", params.threshold, None, _FALLBACK)


def _opinion(step: StepResult, row: int) -> Opinion:
    return Opinion.of(step.logits[row], int(step.index[row]), int(step.params["top"][row]))


def _side(index: int) -> type[Algorithm]:
    return CollmEntry if index == 0 else CollmPeer


ALGORITHM = Definition("collm", _side, CollmParams)
