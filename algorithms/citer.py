"""Hand over where a trained head does not trust the small model's token.

Rule: with s the head's confidence (see `confidence_head`), the entry hands over when s < threshold; its sample is dropped and the
peer writes that position (rewrite family), one token at a time. The first output token is routed too. At equality the small
model's token stays.
Source: CITER, arXiv 2502.01976. Its official code asks for no threshold: 0.95 on the command line, 0.5 in the function; the
experiments of arXiv 2610.12242 use 0.98, which is the default here without a calibrated one.
Shapes: hidden [R, H], the LM head's input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from algorithms.base import Algorithm, Definition, ReturnAfterOne, RouteContext, StepResult
from algorithms.confidence_head import ConfidenceHead
from algorithms.head_threshold import Threshold, choose, in_force, sidecar_threshold

_FALLBACK = Threshold(
    0.98, "not calibrated: that of arXiv 2610.12242 (the official code: 0.95 on its command line, 0.5 in its function)"
)


class CiterParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `citer`."""

    checkpoint: Annotated[str, Meta(min_length=1, description="The head in the official format, a .pth file.")]
    threshold: Annotated[
        float,
        Meta(
            ge=-1,
            le=2,
            description=(
                "Confidence below which the peer writes; -1 = the one calibrated in <checkpoint>.json, else 0.98."
                " 0 = never, above 1 = always."
            ),
        ),
    ] = -1.0


class CiterEntry(Algorithm):
    """The small side: the head looks at every row."""

    def __init__(self, context: RouteContext, params: CiterParams) -> None:
        super().__init__(context, params)
        path = Path(params.checkpoint)
        self._head = ConfidenceHead.load(path, "checkpoint", context)
        calibrated = sidecar_threshold(path, "checkpoint", context.hidden_size, ("citer",))
        self._default = choose("citer", params.threshold, calibrated, _FALLBACK)

    def confidence(self, step: StepResult) -> torch.Tensor:
        """[R] float32 confidence that each row's token will do."""
        return self._head(step.hidden)

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where s < threshold."""
        return (self.confidence(step) < in_force(step.params["threshold"], self._default)).long()


def _side(index: int) -> type[Algorithm]:
    return CiterEntry if index == 0 else ReturnAfterOne


ALGORITHM = Definition("citer", _side, CiterParams)
