"""R-Stitch: the large model takes over where the small one is unsure, and writes until it is sure itself.

Rule: with E = entropy / log V of the full softmax of the current writer's raw logits, in [0, 1], the small side (entry) hands
over when E > tau and drops its token, so that the large side writes that position (rewrite family). The large side keeps its
token whatever E is and goes back when E <= tau (keep family). At equality the small model writes on either side.

The large side must keep its confident token: if it dropped it, a position where the small model is unsure and the large one
sure would be handed back and forth for ever.

With a checkpoint, a trained head has the last word on the small side: of the rows where E > tau, those stay whose confidence
(see `confidence_head`) reaches the threshold.
Source: R-Stitch, arXiv 2507.17307 (from v4 on; earlier versions used confidence). The logits are taken before temperature and
filters, which the paper leaves open. The network of its variant R-Stitch+ is unpublished; the head here is CITER's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from algorithms import uncertainty
from algorithms.base import Algorithm, Definition, RouteContext, StepResult
from algorithms.confidence_head import ConfidenceHead
from algorithms.head_threshold import Threshold, choose, in_force, sidecar_threshold

_FALLBACK = Threshold(0.5, "not calibrated: the paper names none for its variant with a head")


class RStitchParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `rstitch`."""

    tau: Annotated[
        float,
        Meta(
            ge=-1,
            le=1,
            description=(
                "Entropy / log V above which the large model writes; 1 = never, below 0 = always and to the end."
                " The paper uses 0.001 to 0.03."
            ),
        ),
    ]
    vocab: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "V of log V; 0 = the ids of the tokenizer. The rows of the LM head (151936 for Qwen3), of which"
                " some belong to no id, give the values of programs that count those too."
            ),
        ),
    ] = 0
    checkpoint: Annotated[
        str,
        Meta(description="A head in CITER's format, a .pth file, that decides where E > tau; '' = all of these go."),
    ] = ""
    threshold: Annotated[
        float,
        Meta(
            ge=-1,
            le=2,
            description=(
                "With a checkpoint: the head's confidence below which an unsure row goes; -1 = the one calibrated in"
                " <checkpoint>.json, else 0.5."
            ),
        ),
    ] = -1.0


def _normalized(step: StepResult) -> torch.Tensor:
    """[R] entropy / log V, in [0, 1]."""
    columns = torch.full_like(step.params["vocab"], step.logits.shape[-1])
    vocab = torch.where(step.params["vocab"] >= 2, step.params["vocab"], columns)
    return (uncertainty.entropy(step.logits) / vocab.log()).clamp_(max=1.0)


class RStitchSmall(Algorithm):
    """The entry: unsure rows go to the large model, unless a head trusts them."""

    def __init__(self, context: RouteContext, params: RStitchParams) -> None:
        super().__init__(context, params)
        self._head: ConfidenceHead | None = None
        if params.checkpoint:
            path = Path(params.checkpoint)
            self._head = ConfidenceHead.load(path, "checkpoint", context)
            calibrated = sidecar_threshold(path, "checkpoint", context.hidden_size, ("rstitch", "citer"))
            self._default = choose("rstitch", params.threshold, calibrated, _FALLBACK)

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where E > tau, and the head, if there is one, does not trust the small model."""
        away = _normalized(step) > step.params["tau"]
        if self._head is not None:
            away &= self._head(step.hidden) < in_force(step.params["threshold"], self._default)
        return away.long()


class RStitchLarge(Algorithm):
    """The large side: keeps every token and gives control back after a confident one."""

    keep_sample = True

    def route(self, step: StepResult) -> torch.Tensor:
        """The entry where E <= tau."""
        return (_normalized(step) <= step.params["tau"]) * self.context.destination(0)


def _side(index: int) -> type[Algorithm]:
    return RStitchSmall if index == 0 else RStitchLarge


ALGORITHM = Definition("rstitch", _side, RStitchParams)
