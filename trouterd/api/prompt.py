"""From messages or text to prompt ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from models.chat_template import ChatTemplateError
from models.tokenizer import Tokenizer
from trouterd.api.errors import RequestError, invalid, over_context, unsupported
from trouterd.api.schema import ChatMessage, ContentPart

T = TypeVar("T")
INLINE_SIZE = 8192
"""Longer texts (characters) and lists (ids) are worked on in a thread, so that they do not hold up the tokens of others."""
_LONG_SIZE = 1 << 20
"""Longer ones take their turn in one thread: tokenizing takes about 150 times the memory of a text while it lasts."""
_LONG = ThreadPoolExecutor(1, "long-prompt")

_RESERVED_KWARGS = frozenset(
    ("add_generation_prompt", "bos_token", "eos_token", "messages", "pad_token", "self", "tools", "unk_token")
)
"""What requests say elsewhere, or cannot say."""


class TemplateFields(Protocol):
    """The request fields that say how messages become a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def _content(parts: Sequence[ContentPart], where: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        if part.type != "text":
            raise unsupported(f"{where}[{number}].type", f"content parts of type {part.type[:64]!r} are not supported")
        if part.text is None:
            raise invalid(f"{where}[{number}].text is missing", f"{where}[{number}].text")
        texts.append(part.text)
    return "".join(texts)


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as a chat template expects them: text parts joined, role developer as system, no nulls.

    Raises:
        RequestError: 400 naming the message.
    """
    if not messages:
        raise invalid("messages: at least one message is needed", "messages")
    rendered = []
    for number, message in enumerate(messages):
        where = f"messages[{number}].content"
        if message.content is None and not message.tool_calls:
            raise invalid(f"{where} is missing", where)
        content = message.content if isinstance(message.content, str) else _content(message.content or (), where)
        turn: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content,
        }
        for name in ("name", "reasoning_content", "tool_calls", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                turn[name] = value
        rendered.append(turn)
    return rendered


def question(messages: Sequence[ChatMessage]) -> str:
    """Text of the last message of the user, or of the last one where the user has said nothing."""
    turns = template_messages(messages)
    asked = next((turn for turn in reversed(turns) if turn["role"] == "user"), turns[-1])
    return str(asked["content"])


def _template_kwargs(fields: TemplateFields) -> dict[str, Any]:
    kwargs = dict(fields.chat_template_kwargs or {})
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        param = f"chat_template_kwargs.{reserved[0]}"
        raise invalid(f"{param}: this name cannot be set here", param)
    continued = bool(fields.continue_final_message)
    generate = not continued if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continued and generate:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    return kwargs | {"add_generation_prompt": generate, "continue_final_message": continued}


async def in_turn(size: int, work: Callable[[], T]) -> T:
    """The result of `work` over a text or list of `size` items; in a thread when it is long, one at a time when it is very long."""
    if size <= INLINE_SIZE:
        return work()
    if size <= _LONG_SIZE:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_LONG, work)


def _open_end(text: str, final: str) -> str:
    """The rendered conversation without whatever its template puts after the final message.

    Raises:
        RequestError: 400, there is nothing to continue, or the template changed it beyond recognition.
    """
    stripped = final.strip()
    start = text.rfind(stripped) if stripped else -1
    if start < 0:
        raise invalid("continue_final_message: the final message has no text to continue", "continue_final_message")
    with_spaces = final.lstrip()
    kept = with_spaces if text.startswith(with_spaces, start) else stripped
    return text[: start + len(kept)]


def _check_length(tokenizer: Tokenizer, text: str, context: int | None, param: str) -> None:
    """Refuse a text that cannot fit before it is tokenized.

    Raises:
        RequestError: 400.
    """
    if context is not None and tokenizer.exceeds(text, context):
        raise over_context(f"the prompt of {len(text)} characters has more tokens than the context of {context}", param)


def _encode_chat(
    tokenizer: Tokenizer, turns: Sequence[dict[str, Any]], kwargs: dict[str, Any], context: int | None
) -> list[int]:
    text = tokenizer.apply_chat_template(turns, **kwargs)
    if kwargs["continue_final_message"]:
        text = _open_end(text, turns[-1]["content"])
    _check_length(tokenizer, text, context, "messages")
    return tokenizer.encode(text, add_special=False)


async def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], fields: TemplateFields, *, context: int | None = None
) -> list[int]:
    """Prompt ids of a conversation. The template alone decides about BOS.

    Args:
        tokenizer: the model's.
        messages: the conversation.
        fields: how it becomes a prompt.
        context: tokens; a text that certainly has more is refused at once. None: of any length.

    Raises:
        RequestError: 400 when the messages or the template refuse, or there is too much of them.
    """
    turns, kwargs = template_messages(messages), _template_kwargs(fields)
    size = sum(len(turn["content"]) for turn in turns)
    try:
        return await in_turn(size, lambda: _encode_chat(tokenizer, turns, kwargs, context))
    except ChatTemplateError as error:
        raise RequestError(400, "invalid_messages", str(error), param="messages") from error


async def text_prompt(tokenizer: Tokenizer, text: str, *, add_special: bool, context: int | None = None) -> list[int]:
    """Prompt ids of a plain text; BOS is added where the tokenizer adds it. `context` as for `chat_prompt`.

    Raises:
        RequestError: 400, more than the context holds.
    """
    _check_length(tokenizer, text, context, "prompt")
    return await in_turn(len(text), lambda: tokenizer.encode(text, add_special=add_special))
