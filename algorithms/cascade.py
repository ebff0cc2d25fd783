"""Cascades: the small model writes, and the large one takes over where what was written is not good enough.

Rule by `mode`:
- "sequence": the small model answers in full; the answer is accepted when its score >= threshold, otherwise the large model
  writes all of it from the prompt.
- "chunk": the same test for each chunk of `chunk` tokens (output indices k * chunk to (k + 1) * chunk - 1); a chunk that fails is
  written by the large model.
- "speculative": rounds of `gamma` drafts as in `speculative`, but the large model verifies only positions that a rule defers
  (r = 1); a draft with r = 0 is accepted as it is. With q and p the small and the large model's distributions there: "chow": r = 1
  where max q < 1 - alpha; "diff": r = 1 where max q < max p - alpha. The law of a position is then (1 - r) q + r p.

The score of tokens is the mean, or a low quantile, of their log-probabilities under the small model. Score, max q and max p are
those of raw logits, before temperature and filters.
Sources: FrugalGPT (sequence), arXiv 2305.05176; quantiles of token scores, arXiv 2404.10136; speculative cascades,
arXiv 2405.19261, without its rules OPT and V1 to V3. The chunk form has no published source.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from algorithms import uncertainty
from algorithms.base import Algorithm, Definition, RouteContext, StepResult
from algorithms.drafting import Drafter, DraftRows, Drafts, Verdict, Verifier
from algorithms.speculative import full


class CascadeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `cascade`."""

    mode: Annotated[
        Literal["sequence", "chunk", "speculative"],
        Meta(description="Test the whole answer, chunks of it, or single positions in rounds of drafts."),
    ]
    threshold: Annotated[
        float,
        Meta(ge=-1000, le=0, description="sequence, chunk: least score, a log-probability, that is accepted."),
    ] = -1.0
    measure: Annotated[
        Literal["mean", "quantile"],
        Meta(description="sequence, chunk: score of the tokens: mean or quantile of their log-probabilities."),
    ] = "mean"
    quantile: Annotated[
        float,
        Meta(ge=0, le=1, description="Which quantile; 0 is the least likely token."),
    ] = 0.1
    chunk: Annotated[int, Meta(ge=1, le=65536, description="chunk: tokens of a chunk.")] = 16
    gamma: Annotated[int, Meta(ge=1, le=64, description="speculative: most drafts of a round.")] = 4
    rule: Annotated[
        Literal["chow", "diff"],
        Meta(description="speculative: compare the small model's confidence with 1, or with the large model's."),
    ] = "chow"
    alpha: Annotated[
        float,
        Meta(ge=-1, le=1, description="speculative: margin by which the small model may fall short and still write."),
    ] = 0.5


class CascadeSmall(Drafter):
    """The entry: drafts, and judges by its own scores unless the mode is speculative."""

    def __init__(self, context: RouteContext, params: CascadeParams) -> None:
        super().__init__(context, params)
        self.mode = params.mode
        self.measure = params.measure

    def score(self, step: StepResult) -> torch.Tensor:
        """The token's log-probability; max q with mode = "speculative"."""
        if self.mode == "speculative":
            return uncertainty.confidence(step.logits)
        logits = step.logits.float()
        return logits.gather(-1, step.tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)

    def judge(self, drafts: Drafts) -> Verdict:
        """Draft to the end of the answer, chunk or round; then accept, drop or verify."""
        if self.mode == "speculative":
            return full(drafts)
        if not (drafts.ended or (self.mode == "chunk" and self._chunk_is_full(drafts))):
            return Verdict.DRAFT
        return Verdict.ACCEPT if self._score(drafts) >= drafts.params["threshold"] else Verdict.DROP

    def _chunk_is_full(self, drafts: Drafts) -> bool:
        return (drafts.index + len(drafts)) % drafts.params["chunk"] == 0

    def _score(self, drafts: Drafts) -> float:
        if self.measure == "mean":
            return math.fsum(drafts.scores) / len(drafts)
        return sorted(drafts.scores)[int(drafts.params["quantile"] * (len(drafts) - 1))]


class CascadeLarge(Verifier):
    """The large side: writes on to the end of the answer or chunk, or verifies what the rule defers."""

    def __init__(self, context: RouteContext, params: CascadeParams) -> None:
        super().__init__(context, params)
        self.mode = params.mode
        self.rule = params.rule

    def route(self, step: StepResult) -> torch.Tensor:
        """Back after the last token of a chunk, after any token of a speculative cascade, else never."""
        back = super().route(step)
        if self.mode == "speculative":
            return back
        if self.mode == "sequence":
            return torch.zeros_like(back)
        return back.masked_fill((step.index + 1) % step.params["chunk"].long() != 0, 0)

    def accept(self, rows: DraftRows) -> torch.Tensor:
        """Drafts that are not deferred, and those that this model draws itself."""
        least = 1.0 if self.rule == "chow" else uncertainty.confidence(rows.logits)
        return super().accept(rows) | (rows.scores >= least - rows.params["alpha"])


def _side(index: int) -> type[Algorithm]:
    return CascadeSmall if index == 0 else CascadeLarge


ALGORITHM = Definition("cascade", _side, CascadeParams)
