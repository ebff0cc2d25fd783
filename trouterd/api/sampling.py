"""From request fields to the sampling parameters that travel to the workers."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from ipc.messages import Sampling
from trouterd.api.errors import invalid, over_context
from trouterd.api.schema import MAX_STOP_CHARACTERS, MAX_STOPS, SamplingFields

_U64 = (1 << 64) - 1


def check_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Refuse anything but integers in [0, vocab_size).

    Raises:
        RequestError: 400 naming `param` and the first offender.
    """
    for token_id in ids:
        if type(token_id) is not int:
            raise invalid(f"{param}: expected token ids (integers), got {type(token_id).__name__}", param)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        culprit = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise invalid(f"{param}: token id {culprit} is outside the vocabulary of {vocab_size}", param)


def stop_strings(request: SamplingFields) -> tuple[str, ...]:
    """`stop` as a tuple without repetitions.

    Raises:
        RequestError: 400, too many, empty or overlong.
    """
    stop = request.stop
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOPS:
        raise invalid(f"stop: at most {MAX_STOPS} strings, got {len(strings)}", "stop")
    if not all(strings):
        raise invalid("stop: strings must not be empty", "stop")
    if any(len(string) > MAX_STOP_CHARACTERS for string in strings):
        raise invalid(f"stop: strings of at most {MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(dict.fromkeys(strings))


def _token_budget(request: SamplingFields, prompt_tokens: int, context: int, prompt_param: str) -> int:
    """Most tokens to generate: the explicit number, or what the context leaves."""
    if prompt_tokens >= context:
        raise over_context(
            f"the prompt has {prompt_tokens} tokens; the context of {context} tokens leaves no room for an answer",
            prompt_param,
        )
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(request, name)
    if asked is None:
        return context - prompt_tokens
    if prompt_tokens + asked > context:
        raise over_context(
            f"{prompt_tokens} prompt tokens and {name}={asked} are {prompt_tokens + asked} tokens; "
            f"the context has {context}",
            name,
        )
    return asked


def _value(given: float | None, default: float) -> float:
    return default if given is None else given


def sampling_for(
    request: SamplingFields, prompt_tokens: int, context: int, vocab_size: int, prompt_param: str
) -> list[Sampling]:
    """One Sampling per choice; absent fields take the OpenAI defaults.

    Args:
        request: the fields, types and ranges already checked.
        prompt_tokens: length of the prompt.
        context: smallest context of the route's models, tokens.
        vocab_size: ids in stop_token_ids must be below it.
        prompt_param: the field that the prompt came from, for error messages.

    Raises:
        RequestError: 400, `context_length_exceeded` or a bad value.
    """
    max_tokens = _token_budget(request, prompt_tokens, context, prompt_param)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens={min_tokens} is more than the {max_tokens} tokens to generate", "min_tokens")
    stop_ids: Iterable[int] = request.stop_token_ids or ()
    check_ids(tuple(stop_ids), vocab_size, "stop_token_ids")
    seed = secrets.randbits(64) if request.seed is None else request.seed & _U64
    return [
        Sampling(
            seed=seed,
            max_tokens=max_tokens,
            temperature=_value(request.temperature, 1.0),
            top_p=_value(request.top_p, 1.0),
            top_k=max(request.top_k or 0, 0),
            min_p=_value(request.min_p, 0.0),
            choice=choice,
            min_tokens=min_tokens,
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            ignore_eos=bool(request.ignore_eos),
        )
        for choice in range(request.n or 1)
    ]
