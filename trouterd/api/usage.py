"""The `usage` object: OpenAI's token counts and our `route` extension."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trouterd.api.answer import Answer
from trouterd.api.live import LiveRequest


class RouteUsage(msgspec.Struct, frozen=True):
    """How the route worked, over all choices."""

    handoffs: int
    """Both directions."""
    tokens: dict[str, int]
    """Model -> tokens it wrote; they add up to completion_tokens."""
    pending_ms: float
    """Time between a hand-off and the request's return, summed."""
    forwards: dict[str, int]
    """Model -> its forward passes that had rows of this request, prefill included; a peer's as far as its visits have told them."""
    drafted: int
    """Tokens that the entry wrote provisionally (algorithms with drafts)."""
    accepted: int
    """Those of them that became output."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request."""

    prompt_tokens: int
    """Each prompt counted once, however many choices it has."""
    completion_tokens: int
    total_tokens: int
    route: RouteUsage


def usage_of(live: LiveRequest, answers: Sequence[Answer]) -> Usage:
    """Counts so far."""
    if len(answers) == 1:
        return _of_one(live, answers[0])
    prompt = sum(one.job.prompt_tokens for one in live.generations if one.job.sampling.choice == 0)
    completion = sum(answer.completion_tokens for answer in answers)
    names = live.served.models
    tokens = {name: sum(answer.tokens_by_writer[index] for answer in answers) for index, name in enumerate(names)}
    handoffs = sum(answer.handoffs for answer in answers)
    pending_us = sum(answer.pending_us for answer in answers)
    route = RouteUsage(
        handoffs=handoffs,
        tokens=tokens,
        pending_ms=round(pending_us / 1000, 3),
        forwards={name: sum(answer.forwards[index] for answer in answers) for index, name in enumerate(names)},
        drafted=sum(answer.drafted for answer in answers),
        accepted=sum(answer.accepted for answer in answers),
    )
    return Usage(prompt, completion, prompt + completion, route)


def _of_one(live: LiveRequest, answer: Answer) -> Usage:
    """The same for one choice: with `continuous_usage_stats` it is asked for with every token."""
    names, prompt = live.served.models, live.generations[0].job.prompt_tokens
    route = RouteUsage(
        handoffs=answer.handoffs,
        tokens=dict(zip(names, answer.tokens_by_writer, strict=True)),
        pending_ms=round(answer.pending_us / 1000, 3),
        forwards=dict(zip(names, answer.forwards, strict=True)),
        drafted=answer.drafted,
        accepted=answer.accepted,
    )
    return Usage(prompt, answer.completion_tokens, prompt + answer.completion_tokens, route)
