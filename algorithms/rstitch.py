"""R-Stitch: the large model takes over where the small one is unsure, and writes until it is sure itself.

Rule: with E = entropy / log V of the full softmax of the current writer's raw logits, in [0, 1], the small side (entry) hands
over when E > tau and drops its token, so that the large side writes that position (rewrite family). The large side keeps its
token whatever E is and goes back when E <= tau (keep family). At equality the small model writes on either side.

The large side must keep its confident token: if it dropped it, a position where the small model is unsure and the large one
sure would be handed back and forth for ever.
Source: R-Stitch, arXiv 2507.17307 (from v4 on; earlier versions used confidence). The logits are taken before temperature and
filters, which the paper leaves open.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from algorithms import uncertainty
from algorithms.base import Algorithm, Definition, StepResult


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


def _normalized(step: StepResult) -> torch.Tensor:
    """[R] entropy / log V, in [0, 1]."""
    columns = torch.full_like(step.params["vocab"], step.logits.shape[-1])
    vocab = torch.where(step.params["vocab"] >= 2, step.params["vocab"], columns)
    return (uncertainty.entropy(step.logits) / vocab.log()).clamp_(max=1.0)


class RStitchSmall(Algorithm):
    """The entry: unsure rows go to the large model."""

    def route(self, step: StepResult) -> torch.Tensor:
        """1 where E > tau."""
        return (_normalized(step) > step.params["tau"]).long()


class RStitchLarge(Algorithm):
    """The large side: keeps every token and gives control back after a confident one."""

    keep_sample = True

    def route(self, step: StepResult) -> torch.Tensor:
        """The entry where E <= tau."""
        return (_normalized(step) <= step.params["tau"]) * self.context.destination(0)


def _side(index: int) -> type[Algorithm]:
    return RStitchSmall if index == 0 else RStitchLarge


ALGORITHM = Definition("rstitch", _side, RStitchParams)
