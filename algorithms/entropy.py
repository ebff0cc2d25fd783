"""Hand over where the small model is unsure of its next token.

Rule: with the default measure, the entropy H of the full softmax of the raw logits, in nats, the entry hands over when
H >= threshold; its sample is dropped and the peer writes that position (rewrite family). The first output token is routed
too. At equality the token is handed over, whatever the measure.
Source: the entropy baseline of R2R, arXiv 2505.21600, which uses 0.45 nats.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from algorithms import uncertainty
from algorithms.base import Algorithm, Definition, ReturnAfterOne, RouteContext, StepResult

Measure = Literal["entropy", "normalized_entropy", "confidence", "margin"]


class EntropyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `entropy`."""

    threshold: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "In the measure's unit. 'entropy' (nats) and 'normalized_entropy' (0 to 1) hand over at or above it,"
                " 'confidence' and 'margin' (0 to 1) at or below it. R2R's baseline: 0.45 nats."
            ),
        ),
    ]
    measure: Annotated[
        Measure,
        Meta(
            description="entropy in nats; entropy / log V; largest probability; difference of the two largest ones.",
        ),
    ] = "entropy"
    back: Annotated[
        Literal["one", "confident"],
        Meta(description="The peer returns after one token, or after its first token that the same test calls sure."),
    ] = "one"


def unsure(step: StepResult, measure: Measure) -> torch.Tensor:
    """[R] bool: the rows whose measure reaches the threshold on its unsure side."""
    threshold = step.params["threshold"]
    match measure:
        case "entropy":
            return uncertainty.entropy(step.logits) >= threshold
        case "normalized_entropy":
            return uncertainty.normalized_entropy(step.logits) >= threshold
        case "confidence":
            return uncertainty.confidence(step.logits) <= threshold
        case "margin":
            return uncertainty.margin(step.logits) <= threshold


class EntropyEntry(Algorithm):
    """The small side: unsure rows go to the peer, which writes their position."""

    def __init__(self, context: RouteContext, params: EntropyParams) -> None:
        super().__init__(context, params)
        self.measure = params.measure

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where the measure says unsure."""
        return unsure(step, self.measure).long()


class EntropyPeer(ReturnAfterOne):
    """The large side: keeps its token; goes back at once, or with back = "confident" only when it is sure itself."""

    def __init__(self, context: RouteContext, params: EntropyParams) -> None:
        super().__init__(context, params)
        self.measure = params.measure
        self.writes_on = params.back == "confident"

    def route(self, step: StepResult) -> torch.Tensor:
        """Back to the entry, except that an unsure row stays where back = "confident"."""
        back = super().route(step)
        return back.masked_fill(unsure(step, self.measure), 0) if self.writes_on else back


def _side(index: int) -> type[Algorithm]:
    return EntropyEntry if index == 0 else EntropyPeer


ALGORITHM = Definition("entropy", _side, EntropyParams)
