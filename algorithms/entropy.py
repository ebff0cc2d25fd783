"""Hand over where the small model is unsure of its next token.

Rule: with the default measure, the entropy H of the full softmax of the raw logits, in nats, the entry hands over when
H >= threshold; its sample is dropped and the peer writes that position (rewrite family). The first output token is routed
too. At equality the token is handed over, whatever the measure. A peer that goes on until it is sure may have a threshold of its
own (hysteresis).
Source: the entropy and log-U baselines of R2R, arXiv 2505.21600, which use 0.45 nats and an aleatoric uncertainty of 2.275.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from algorithms import uncertainty
from algorithms.base import Algorithm, Definition, ReturnAfterOne, RouteContext, StepResult

Measure = Literal["entropy", "normalized_entropy", "confidence", "margin", "aleatoric", "epistemic"]


class EntropyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `entropy`."""

    threshold: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "In the measure's unit. 'confidence' and 'margin' (0 to 1) hand over at or below it, the others at or"
                " above it. R2R's baselines: 0.45 nats of entropy; aleatoric 2.275."
            ),
        ),
    ]
    measure: Annotated[
        Measure,
        Meta(
            description=(
                "entropy in nats; entropy / log V; largest probability; difference of the two largest ones; log-U's"
                " aleatoric and epistemic uncertainty of the ten largest logits."
            ),
        ),
    ] = "entropy"
    back: Annotated[
        Literal["one", "confident"],
        Meta(description="The peer returns after one token, or after its first token that the same test calls sure."),
    ] = "one"
    threshold_back: Annotated[
        float,
        Meta(
            ge=-1,
            description=(
                "back = 'confident': the peer goes on while its own measure reaches this; -1 = the same as threshold."
            ),
        ),
    ] = -1.0
    epistemic: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="measure = 'aleatoric': the epistemic uncertainty must reach this as well; 0 = any does.",
        ),
    ] = 0.0


def unsure(step: StepResult, measure: Measure, threshold: torch.Tensor) -> torch.Tensor:
    """[R] bool: the rows whose measure reaches the threshold [R] on its unsure side."""
    match measure:
        case "entropy":
            return uncertainty.entropy(step.logits) >= threshold
        case "normalized_entropy":
            return uncertainty.normalized_entropy(step.logits) >= threshold
        case "confidence":
            return uncertainty.confidence(step.logits) <= threshold
        case "margin":
            return uncertainty.margin(step.logits) <= threshold
        case "epistemic":
            return uncertainty.epistemic(step.logits) >= threshold
        case "aleatoric":
            enough = uncertainty.epistemic(step.logits) >= step.params["epistemic"]
            return enough & (uncertainty.aleatoric(step.logits) >= threshold)


class EntropyEntry(Algorithm):
    """The small side: unsure rows go to the peer, which writes their position."""

    def __init__(self, context: RouteContext, params: EntropyParams) -> None:
        super().__init__(context, params)
        self.measure = params.measure

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where the measure says unsure."""
        return unsure(step, self.measure, step.params["threshold"]).long()


class EntropyPeer(ReturnAfterOne):
    """The large side: keeps its token; goes back at once, or with back = "confident" only when it is sure itself."""

    def __init__(self, context: RouteContext, params: EntropyParams) -> None:
        super().__init__(context, params)
        self.measure = params.measure
        self.writes_on = params.back == "confident"

    def route(self, step: StepResult) -> torch.Tensor:
        """Back to the entry, except that an unsure row stays where back = "confident"."""
        back = super().route(step)
        if not self.writes_on:
            return back
        own = step.params["threshold_back"]
        return back.masked_fill(unsure(step, self.measure, own.where(own >= 0, step.params["threshold"])), 0)


def _side(index: int) -> type[Algorithm]:
    return EntropyEntry if index == 0 else EntropyPeer


ALGORITHM = Definition("entropy", _side, EntropyParams)
