"""Request bodies: typed structs, and which other fields are refused, neutral or merely unknown."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from trouterd.api.errors import RequestError, invalid, unsupported
from trouterd.api.metrics import ApiMetrics

log = logging.getLogger("trouterd.api.schema")

T = TypeVar("T", bound=msgspec.Struct)
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_REMEMBERED_FIELDS = 256


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Overrides = dict[str, float | list[float]]
"""Numeric parameters by name, as requests give them."""


class RouteOverride(msgspec.Struct, forbid_unknown_fields=True):
    """`route`: our extension; what the route's algorithm is told for this request alone."""

    params: Overrides = {}
    score: float | None = None
    """How much the strong model is wanted, for algorithm `query` with source `field`."""
    embedding: list[float] | None = None
    """The prompt's embedding, for algorithm `query` with source `mf`."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions share; null always means the default."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    route: RouteOverride | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One element of `messages`; what a template may want of tool and reasoning turns is passed through."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions. `prompt`: a string, a list of strings, token ids, or a list of token id lists."""

    prompt: str | list[Any]
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def _zero(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == 0


def _empty(value: Any) -> bool:
    return isinstance(value, str | list | dict) and not value


# Fields of the interface that are not implemented, with the values that ask for nothing. null always asks for nothing.
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "logprobs": _one_of(False),
    "top_logprobs": _zero,
    "prompt_logprobs": _one_of(False),
    "echo": _one_of(False),
    "best_of": _one_of(1),
    "suffix": _empty,
    "presence_penalty": _zero,
    "frequency_penalty": _zero,
    "repetition_penalty": _one_of(1, 1.0),
    "logit_bias": _empty,
    "allowed_token_ids": _empty,
    "bad_words": _empty,
    "stop_regex": _empty,
    "response_format": _one_of({"type": "text"}),
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "regex": _empty,
    "ebnf": _empty,
    "json_schema": _empty,
    "tools": _empty,
    "tool_choice": _one_of("none", "auto"),
    "functions": _empty,
    "function_call": _one_of("none", "auto"),
    "modalities": _one_of(["text"]),
    "audio": _empty,
    "chat_template": _empty,
    "truncate_prompt_tokens": _empty,
    "use_beam_search": _one_of(False),
}
_WHERE = re.compile(r"(?: - at `\$\.?(?P<path>.*)`)?$")
_MISSING = re.compile(r"(?:missing required|contains unknown) field `(?P<name>[^`]*)`")


class FieldCensus:
    """Unknown request fields: accepted, counted, and named in the log once."""

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics
        self._warned: set[str] = set()

    def note(self, name: str) -> None:
        """Count one occurrence."""
        self._metrics.unknown_fields += 1
        if name not in self._warned and len(self._warned) < MAX_REMEMBERED_FIELDS:
            self._warned.add(name)
            log.warning("unknown request field %r is ignored", name[:64])


def _malformed(error: Exception) -> RequestError:
    return RequestError(400, "invalid_json", f"the request body is not valid JSON: {error}")


def _wrong_field(error: msgspec.ValidationError) -> RequestError:
    """400 with the path of the field that msgspec names in its message."""
    text = str(error)
    where = _WHERE.search(text)
    path = (where["path"] if where else None) or ""
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    reason = text[: where.start()] if where else text
    return invalid(f"{path or 'request body'}: {reason}", path or None)


def _check_extras(extras: dict[str, msgspec.Raw], census: FieldCensus) -> None:
    for name, raw in extras.items():
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            census.note(name)
            continue
        value = msgspec.json.decode(raw)
        if value is not None and not neutral(value):
            raise unsupported(name)


def decode(body: bytes, kind: type[T], census: FieldCensus) -> T:
    """The request in a body.

    Raises:
        RequestError: 400 for malformed JSON, a wrong type or range (naming the field) or an unsupported parameter.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        known = kind.__struct_fields__
        _check_extras({name: raw for name, raw in fields.items() if name not in known}, census)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(error) from error
    except RecursionError as error:
        raise invalid("the request body is nested too deeply") from error
