"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from trouterd.api.answer import Delta
from trouterd.api.generate import Collected, MaybeUsage, address, check_choices, plan_for, respond
from trouterd.api.prompt import chat_prompt, question
from trouterd.api.schema import ChatRequest, decode
from trouterd.api.services import SERVICES
from trouterd.api.usage import Usage


class ChatDelta(msgspec.Struct, frozen=True):
    """`delta` of a streamed choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: MaybeUsage = UNSET


class AnswerMessage(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    """`message` of a whole choice."""

    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a whole answer."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: None = None
    token_ids: list[int] | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion"):
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatShape:
    """Chat JSON; see `trouterd.api.generate.Shape`."""

    def __init__(self, request_id: str, model: str, writers: Sequence[str] | None) -> None:
        """`writers`: names by writer index when the client asked for token ids, else None."""
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._writers = writers

    def opening(self, index: int, usage: MaybeUsage) -> ChatChunk:
        """The chunk with the role."""
        return self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")), usage)

    def chunk(self, index: int, delta: Delta, usage: MaybeUsage) -> ChatChunk:
        """Text, and in the last one the finish reason."""
        content = ChatDelta(content=delta.text) if delta.text or not delta.finish else ChatDelta()
        finish = delta.finish or None
        if self._writers is None:
            return self._chunk(ChatChunkChoice(index, content, None, finish), usage)
        names = [self._writers[writer] for writer in delta.writers]
        return self._chunk(ChatChunkChoice(index, content, None, finish, list(delta.token_ids), names), usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """No choices, only usage."""
        return ChatChunk(self._id, self._created, self._model, (), usage)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> ChatCompletion:
        """The answer in one object."""
        return ChatCompletion(
            self._id,
            self._created,
            self._model,
            [
                ChatChoice(
                    index,
                    AnswerMessage(choice.text),
                    choice.answer.finish,
                    token_ids=UNSET if self._writers is None else choice.token_ids,
                    models=UNSET if self._writers is None else [self._writers[writer] for writer in choice.writers],
                )
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _chunk(self, choice: ChatChunkChoice, usage: MaybeUsage) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, (choice,), usage)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    services = request.app[SERVICES]
    fields = decode(await request.read(), ChatRequest, services.census)
    served = await address(services, fields)
    check_choices(services.engine, fields, 1, "messages")
    context = services.catalog.context(served)
    prompt = await chat_prompt(served.tokenizer, fields.messages, fields, context=context)

    async def text(_: int) -> str:
        return question(fields.messages)

    plan = await plan_for(request, fields, served, [prompt], "messages", text)
    shape = ChatShape(plan.request_id, served.name, served.models if plan.return_token_ids else None)
    return await respond(request, plan, shape)
