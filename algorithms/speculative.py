"""Speculative decoding: the small model drafts, the large one verifies; the answer is the large model's.

Rule: the entry drafts up to `gamma` tokens and hands them over; the large model draws its own token at each position and accepts
the longest run of drafts that equal it, then adds its own next token (a correction, or a bonus behind the last draft).

Both models draw with the noise of the request's seed, choice and output index (Gumbel coupling), so that what comes out is token
for token what the large model alone would have written, greedy and sampled, and equal laws give equal draws. No probabilities have
to travel, unlike with rejection sampling.
Source: speculative decoding, arXiv 2211.17192; drafter-invariant coupling by shared noise, arXiv 2408.07978.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from algorithms.base import Algorithm, Definition
from algorithms.drafting import Drafter, Drafts, Verdict, Verifier


class SpeculativeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `speculative`."""

    gamma: Annotated[
        int,
        Meta(ge=1, le=64, description="Most drafts of a round. 3 to 8 is usual; more pays while most are accepted."),
    ] = 4


class SpeculativeSmall(Drafter):
    """The entry: drafts."""

    def judge(self, drafts: Drafts) -> Verdict:
        """Verify after gamma drafts, or where the large model's own token would use up the budget."""
        return full(drafts)


class SpeculativeLarge(Verifier):
    """The large side: accepts what it would have written."""


def full(drafts: Drafts) -> Verdict:
    """VERIFY when a round has as many drafts as `gamma` or the budget allow, leaving room for the verifier's own token."""
    return Verdict.VERIFY if len(drafts) >= drafts.params["gamma"] or drafts.left <= 1 else Verdict.DRAFT


def _side(index: int) -> type[Algorithm]:
    return SpeculativeSmall if index == 0 else SpeculativeLarge


ALGORITHM = Definition("speculative", _side, SpeculativeParams)
