"""Query-level routing: one decision for a whole answer, before it begins.

Rule: the strong model (the peer) writes the whole answer when score >= threshold, the weak one (the entry) otherwise; nobody
hands back. `source` says where the score comes from:
- "field": a number in the request.
- "random": uniform in [0, 1), drawn by (seed, choice).
- "length": the prompt's tokens.
- "classifier", "mf": a trained model of the prompt; see `prompt_scores`. The api asks it.
- "hidden": 1 - s, with s a confidence head's view (see `confidence_head`) of the weak model's hidden state at the prompt's last
  token. This one needs the weak model's prefill; its first sample is dropped where the strong model writes (rewrite family). All
  others are decided before anything is computed.
Source: RouteLLM, arXiv 2406.18665. The shape of the head for "hidden" is CITER's, arXiv 2502.01976.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from algorithms.base import Algorithm, Definition, PromptView, RouteContext, StepResult
from algorithms.confidence_head import ConfidenceHead
from algorithms.prompt_scores import STRONG, WEAK
from models.rng import Purpose, uniform


class QueryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `query`."""

    source: Annotated[
        Literal["field", "random", "length", "classifier", "mf", "hidden"], Meta(description="What gives the score.")
    ]
    threshold: Annotated[
        float, Meta(ge=0, description="Score from which on the strong model writes; 0 = always, 1e9 = never.")
    ]
    checkpoint: Annotated[
        str,
        Meta(
            description="Of a trained source: directory of the classifier, file or directory of mf, file of the head."
        ),
    ] = ""
    strong: Annotated[int, Meta(ge=0, le=1 << 20, description="mf: row of the strong model.")] = STRONG
    weak: Annotated[int, Meta(ge=0, le=1 << 20, description="mf: row of the weak model.")] = WEAK


class QueryWeak(Algorithm):
    """The entry: decides once, and writes what it has not given away to the end."""

    warms_peers = False

    def __init__(self, context: RouteContext, params: QueryParams) -> None:
        super().__init__(context, params)
        self._source = params.source
        self._head: ConfidenceHead | None = None
        if params.source == "hidden":
            self._head = ConfidenceHead.load(Path(params.checkpoint), "checkpoint", context)

    def start(self, prompt: PromptView) -> int:
        """1 where the strong model writes the answer, if that is known already."""
        return int(self._head is None and self._score(prompt) >= prompt.params["threshold"])

    def _score(self, prompt: PromptView) -> float:
        if self._source == "random":
            return uniform(prompt.seed, prompt.choice, 0, Purpose.ROUTE)
        if self._source == "length":
            return len(prompt.tokens)
        if prompt.score is None:
            raise ValueError(f"source '{self._source}': the request came without a score")
        return prompt.score

    def route(self, step: StepResult) -> torch.Tensor:
        """1 in the first row of an answer that goes to the strong model only now."""
        if self._head is None:
            return torch.zeros_like(step.tokens)
        return ((self.scores(step) >= step.params["threshold"]) & (step.index == 0)).long()

    def scores(self, step: StepResult) -> torch.Tensor:
        """[R] float32 scores of source "hidden". Raises ValueError for the other ones, which need no step."""
        if self._head is None:
            raise ValueError(f"source '{self._source}' scores prompts, not steps")
        return 1 - self._head(step.hidden)


class QueryStrong(Algorithm):
    """The peer: writes to the end."""

    keep_sample = True

    def route(self, step: StepResult) -> torch.Tensor:
        """Never back."""
        return torch.zeros_like(step.tokens)


def _side(index: int) -> type[Algorithm]:
    return QueryWeak if index == 0 else QueryStrong


def _check(params: QueryParams, models: tuple[str, ...]) -> None:
    del models
    trained = params.source in ("classifier", "mf", "hidden")
    if trained and not params.checkpoint:
        raise ValueError(f"checkpoint: needed by source '{params.source}'")
    if params.checkpoint and not trained:
        raise ValueError(f"checkpoint: source '{params.source}' reads none")


ALGORITHM = Definition("query", _side, QueryParams, check=_check)
