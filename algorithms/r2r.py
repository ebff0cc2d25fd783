"""Hand over where a trained router expects the models to diverge.

Rule: with z the router's logit (see `r2r_router`), the entry hands over when p = sigmoid(z) >= threshold; its sample is dropped
and the peer writes that position (rewrite family), one token at a time. The first output token is routed too.
Source: R2R, arXiv 2505.21600. Its checkpoints carry a calibrated threshold, which is used unless one is given here; the
official server instead falls back to 0.5 when none is given.
Shapes: hidden [R, H], embedding of the sampled token [R, E], the `logits_size` (100) largest raw logits [R, 100] in falling order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from algorithms.base import Algorithm, Definition, ReturnAfterOne, RouteContext, StepResult
from algorithms.r2r_router import RouterFile
from algorithms.registry import AlgorithmError
from models.cuda.router_head import MOST_ROWS, largest


class R2RParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `r2r`."""

    checkpoint: Annotated[str, Meta(min_length=1, description="Router checkpoint in the official format, a .pt file.")]
    threshold: Annotated[
        float,
        Meta(
            ge=-1,
            le=2,
            description="Probability from which on the peer writes; -1 = the one calibrated in the checkpoint; above 1 = never.",
        ),
    ] = -1.0
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Type of the router's arithmetic; the official code uses float32."),
    ] = "float32"


class R2REntry(Algorithm):
    """The small side: the router looks at every row."""

    def __init__(self, context: RouteContext, params: R2RParams) -> None:
        super().__init__(context, params)
        file = RouterFile.load(Path(params.checkpoint), "checkpoint")
        if context.embedding is None:
            raise AlgorithmError("r2r needs a model with weights at its entry: its embedding is an input of the router")
        if file.hidden_size != context.hidden_size:
            raise AlgorithmError(
                f"checkpoint: {file.path}: init_args.hidden_states_size: {file.hidden_size}, but model"
                f" '{context.models[0]}' has {context.hidden_size}",
                "checkpoint",
            )
        if file.threshold is None and params.threshold < 0:
            raise AlgorithmError(f"threshold: {file.path} carries no calibrated one; set it", "threshold")
        self._calibrated = 0.5 if file.threshold is None else file.threshold
        self._top = min(file.top, context.vocab_size)
        if self._top < file.top:
            raise AlgorithmError(
                f"checkpoint: {file.path}: init_args.logits_size: {file.top}, but the vocabulary has {context.vocab_size}",
                "checkpoint",
            )
        self._embedding = context.embedding
        self._router = file.build(self._embedding.shape[1], context.device, getattr(torch, params.dtype))

    def probabilities(self, step: StepResult) -> torch.Tensor:
        """[R] float32 probability that the models diverge at each row's position."""
        return self._judge(step)[0]

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where p >= threshold."""
        return self._judge(step)[1]

    def _judge(self, step: StepResult) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and decisions."""
        given, head = step.params["threshold"], self._router.head
        if head is not None and len(step.tokens) <= MOST_ROWS:
            return head(step.hidden, step.tokens, self._embedding, step.logits, given, self._calibrated)
        top = largest(step.logits, self._top)
        probabilities = self._router(step.hidden, self._embedding[step.tokens], top).sigmoid()
        return probabilities, (probabilities >= given.where(given >= 0, self._calibrated)).long()


def _side(index: int) -> type[Algorithm]:
    return R2REntry if index == 0 else ReturnAfterOne


ALGORITHM = Definition("r2r", _side, R2RParams)
