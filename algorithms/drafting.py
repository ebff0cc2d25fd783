"""Algorithms whose entry drafts: its tokens are provisional until it accepts them itself or the peer has verified them.

A *draft* is in the entry's ids and KV, but it is not streamed, not counted as output and does not end the answer. After each one
the entry's side judges all that have gathered (`Drafter.judge`). Drafts that travel are read by the peer in one extend with
logits at every one of them, so that the peer draws its own token at each of these positions, with the request's sampling
parameters and the same position-keyed noise (`Verifier.accept`). Those up to the first one that is not accepted are committed;
there, or behind the last one, the peer's own token follows.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.base import Algorithm, ReturnAfterOne, StepResult


class Verdict(enum.Enum):
    """What becomes of the drafts."""

    DRAFT = "draft"
    """One more. Where the last one would end the answer, the same as VERIFY."""
    ACCEPT = "accept"
    """The entry commits them and goes on."""
    VERIFY = "verify"
    """The peer reads and verifies them."""
    DROP = "drop"
    """The peer does not see them and writes from the first one's position on."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of one request, oldest first; at least one."""

    scores: Sequence[float]
    """What `Drafter.score` gave for each. Not to be modified."""
    ids: Sequence[int]
    """Prompt, committed output and, at the end, the drafts. Not to be modified."""
    index: int
    """Output index of the first draft."""
    left: int
    """Tokens that the request's budget has left behind the last draft."""
    ended: bool
    """The last draft would end the answer: an end-of-answer or stop id, or the last token of the budget."""
    params: Mapping[str, float]
    """The numeric parameters, with the request's overrides."""

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def tokens(self) -> Sequence[int]:
        """The drafted ids (a copy)."""
        return self.ids[len(self.ids) - len(self.scores) :]


@dataclass(slots=True)
class DraftRows:
    """R rows of one forward pass of the verifying model, each in front of one draft. Nothing in it may be modified."""

    logits: torch.Tensor
    """[R, V] float32, raw: this model's, for the draft's position."""
    tokens: torch.Tensor
    """[R] int64: what this model draws there."""
    drafts: torch.Tensor
    """[R] int64: the drafts."""
    scores: torch.Tensor
    """[R] float32: what the drafting side's `score` gave for each."""
    index: torch.Tensor
    """[R] int64: output index of the draft."""
    params: dict[str, torch.Tensor]
    """Each numeric parameter, [R] float32, with the requests' overrides."""


class Drafter(Algorithm):
    """The entry's side of an algorithm with drafts. The route has exactly two models, and the other side is a `Verifier`."""

    keep_sample = True
    pure = False

    def score(self, step: StepResult) -> torch.Tensor:
        """[R] float32: a number per drafted token, which stays with it and travels along; default: 0."""
        return torch.zeros_like(step.tokens, dtype=torch.float32)

    def judge(self, drafts: Drafts) -> Verdict:
        """Asked after each draft: what becomes of those that have gathered. Must depend on nothing but `drafts`."""
        raise NotImplementedError(f"{type(self).__name__} defines no judge()")

    def route(self, step: StepResult) -> torch.Tensor:
        """Never asked: `judge` decides."""
        return torch.zeros_like(step.tokens)


class Verifier(ReturnAfterOne):
    """The peer's side: takes drafts, adds a token of its own, goes back.

    `route` is asked about that token alone; a side that overrides it may write on.
    """

    pure = False

    def accept(self, rows: DraftRows) -> torch.Tensor:
        """[R] bool: the drafts to take; default: those that this model draws itself, which leaves its own law in force."""
        return rows.tokens == rows.drafts
