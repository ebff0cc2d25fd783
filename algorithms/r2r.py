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
from algorithms.head_threshold import Threshold, choose, in_force
from algorithms.r2r_router import RouterFile
from algorithms.registry import AlgorithmError
from models.cuda.router_head import MOST_ROWS, has_values, largest

_SERVER = "the official server takes 0.5 unless told otherwise"


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
        path = Path(params.checkpoint)
        file = RouterFile.load(path, "checkpoint")
        if file.kind.token and context.embedding is None:
            raise AlgorithmError("r2r needs a model with weights at its entry: its embedding is an input of the router")
        if file.kind.hidden and file.hidden_size != context.hidden_size:
            raise AlgorithmError(
                f"checkpoint: {file.path}: init_args.hidden_states_size: {file.hidden_size}, but model"
                f" '{context.models[0]}' has {context.hidden_size}",
                "checkpoint",
            )
        if file.threshold is None and params.threshold < 0:
            raise AlgorithmError(f"threshold: {file.path} carries no calibrated one; set it", "threshold")
        calibrated = None if file.threshold is None else Threshold(file.threshold, f"calibrated in {path}; {_SERVER}")
        self._default = choose("r2r", params.threshold, calibrated, Threshold(0.5, _SERVER))
        self._top = file.top
        if file.top > context.vocab_size:
            raise AlgorithmError(
                f"checkpoint: {file.path}: init_args.logits_size: {file.top}, but the vocabulary has {context.vocab_size}",
                "checkpoint",
            )
        self._embedding = context.embedding if file.kind.token else None
        width = 0 if self._embedding is None else self._embedding.shape[1]
        self._router = file.build(width, context.device, getattr(torch, params.dtype))

    def probabilities(self, step: StepResult) -> torch.Tensor:
        """[R] float32 probability that the models diverge at each row's position."""
        return self._judge(step)[0]

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where p >= threshold."""
        return self._judge(step)[1]

    def _judge(self, step: StepResult) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and decisions."""
        given, head, embedding = step.params["threshold"], self._router.head, self._embedding
        small = len(step.tokens) <= MOST_ROWS and has_values(step.hidden)
        if head is not None and embedding is not None and small:
            return head(step.hidden, step.tokens, embedding, step.logits, given, self._default)
        top = largest(step.logits, self._top) if self._top else None
        embedded = None if embedding is None else embedding[step.tokens]
        probabilities = self._router(step.hidden, embedded, top).sigmoid()
        return probabilities, (probabilities >= in_force(given, self._default)).long()


def _side(index: int) -> type[Algorithm]:
    return R2REntry if index == 0 else ReturnAfterOne


ALGORITHM = Definition("r2r", _side, R2RParams)
