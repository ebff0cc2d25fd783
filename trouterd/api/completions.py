"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from models.tokenizer import Tokenizer
from trouterd.api.answer import Delta
from trouterd.api.errors import invalid
from trouterd.api.generate import Collected, MaybeUsage, address, check_choices, plan_for, respond
from trouterd.api.prompt import in_turn, text_prompt
from trouterd.api.sampling import check_ids
from trouterd.api.schema import CompletionRequest, decode
from trouterd.api.services import SERVICES
from trouterd.api.usage import Usage


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice, streamed or whole."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    """One event of a stream, or a whole answer: the two have the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: MaybeUsage = UNSET


class CompletionShape:
    """Text completion JSON; see `trouterd.api.generate.Shape`."""

    def __init__(self, request_id: str, model: str, writers: Sequence[str] | None) -> None:
        """`writers`: names by writer index when the client asked for token ids, else None."""
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._writers = writers

    def opening(self, index: int, usage: MaybeUsage) -> None:
        """Text completions have no role to announce."""
        del index, usage

    def chunk(self, index: int, delta: Delta, usage: MaybeUsage) -> Completion:
        """Text, and in the last one the finish reason."""
        return self._completion([self._choice(index, delta.text, delta.finish, delta.token_ids, delta.writers)], usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """No choices, only usage."""
        return self._completion([], usage)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> Completion:
        """The answer in one object."""
        return self._completion(
            [
                self._choice(index, choice.text, choice.answer.finish, choice.token_ids, choice.writers)
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _choice(
        self, index: int, text: str, finish: str, token_ids: Sequence[int], writers: Sequence[int]
    ) -> CompletionChoice:
        if self._writers is None:
            return CompletionChoice(index, text, None, finish or None)
        names = [self._writers[writer] for writer in writers]
        return CompletionChoice(index, text, None, finish or None, list(token_ids), names)

    def _completion(self, choices: list[CompletionChoice], usage: MaybeUsage) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)


def _listed(prompt: str | list[Any]) -> list[Any]:
    """Every prompt as a text or a list of ids.

    Raises:
        RequestError: 400, none at all.
    """
    if not prompt and isinstance(prompt, list):
        raise invalid("prompt: empty list", "prompt")
    several = isinstance(prompt, list) and any(all(isinstance(one, kind) for one in prompt) for kind in (str, list))
    return list(prompt) if several else [prompt]


async def _ids(prompt: str | list[Any], tokenizer: Tokenizer, context: int, *, add_special: bool) -> list[int]:
    """One prompt as ids.

    Raises:
        RequestError: 400, neither text nor ids of this vocabulary, or a text that is far too long.
    """
    if isinstance(prompt, str):
        return await text_prompt(tokenizer, prompt, add_special=add_special, context=context)
    await in_turn(len(prompt), lambda: check_ids(prompt, tokenizer.vocab_size, "prompt"))
    return prompt


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts."""
    services = request.app[SERVICES]
    fields = decode(await request.read(), CompletionRequest, services.census)
    served = await address(services, fields)
    listed = _listed(fields.prompt)
    check_choices(services.engine, fields, len(listed), "prompt")
    add_special = fields.add_special_tokens is not False
    context = services.catalog.context(served)
    prompts = [await _ids(prompt, served.tokenizer, context, add_special=add_special) for prompt in listed]

    async def text(number: int) -> str:
        given = listed[number]
        return given if isinstance(given, str) else await in_turn(len(given), lambda: served.tokenizer.decode(given))

    plan = await plan_for(request, fields, served, prompts, "prompt", text)
    shape = CompletionShape(plan.request_id, served.name, served.models if plan.return_token_ids else None)
    return await respond(request, plan, shape)
