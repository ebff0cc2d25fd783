"""What a server understands of what a measurement would like to ask, and conversations in these terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from bench.answer import Answer, AnswerError, Log
from bench.endpoint import Address, Connection, EndpointError
from bench.target import Target
from bench.workloads import FIRST_ID, Prompt, Turn, Workload

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_TOKENS = 8
"""Of the answer to a trial."""
_IDS = 16
"""Of the prompt of a trial."""
_WARMING = 64
"""Of the answer that lets all models of a route see what conversations begin with; each of them writes some of it."""
_WORDS = 256
"""The same, where tokens have to be counted."""
_NOT_UNDERSTOOD = frozenset((400, 404, 405, 415, 422, 501))
"""Statuses of servers that may understand a simpler request."""
_VOCABULARY = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact",
)  # fmt: skip


class Form(Enum):
    """Of a prompt."""

    IDS = "token ids"
    TEXT = "text"
    CHAT = "messages"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to talk to one target.

    Conversations of token ids are put into words for servers that take no ids, about as many tokens as the workload says.
    """

    target: Target
    form: Form
    extras: bool
    """Whether it takes `ignore_eos`, `stream_options` and `return_token_ids` at all."""
    continuous: bool
    """Whether every event has the usage so far."""
    tokens_per_word: float = 1.0

    def fields(self, turn: Turn, prompt: Mapping[str, Any], *, ignore_eos: bool, seed: int) -> dict[str, Any]:
        """Body of a request."""
        body: dict[str, Any] = {"model": self.target.model, **prompt, "max_tokens": turn.max_tokens}
        body |= {"temperature": 0, "seed": seed, "stream": True}
        if self.extras:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            body |= {"ignore_eos": True} if ignore_eos else {}
        return body | dict(self.target.body)


class Conversation:
    """Grows by turns and their answers.

    Args:
        dialect: of the server.
        workload: says how answers end, and how many turns there are.
        seed: of the requests.
    """

    def __init__(self, dialect: Dialect, workload: Workload, seed: int) -> None:
        self._dialect = dialect
        self._workload = workload
        self._seed = seed
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[dict[str, Any]] = []
        self.keeps = workload.turns > 1
        """Whether it needs what answers say."""

    def request(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        """Path and body of the request that says this."""
        path, prompt = self._prompt(turn.said)
        body = self._dialect.fields(turn, prompt, ignore_eos=self._workload.ignore_eos, seed=self._seed)
        return path, body | ({"return_token_ids": True} if self.keeps and "prompt" in prompt else {})

    def answered(self, answer: Answer) -> None:
        """What the next turn follows."""
        if self._dialect.form is Form.IDS:
            self._ids += answer.token_ids()
        elif self._dialect.form is Form.TEXT:
            self._text += answer.text()
        else:
            self._messages.append({"role": "assistant", "content": answer.text()})

    def _prompt(self, said: Prompt) -> tuple[str, dict[str, Any]]:
        if not isinstance(said, str) and isinstance(said[0], dict):
            return _CHAT, {"messages": list(said)}
        if self._dialect.form is Form.IDS and not isinstance(said, str):
            self._ids += [token for token in said if isinstance(token, int)]
            return _COMPLETIONS, {"prompt": self._ids}
        text = said if isinstance(said, str) else self._words(said)
        if self._dialect.form is Form.CHAT:
            self._messages.append({"role": "user", "content": text})
            return _CHAT, {"messages": self._messages}
        self._text += text
        return _COMPLETIONS, {"prompt": self._text}

    def _words(self, ids: Prompt) -> str:
        """About as many tokens as ids, each word by the id in its place: prompts are alike for as many tokens as their ids are."""
        rate = self._dialect.tokens_per_word
        numbers = [token for token in ids if isinstance(token, int)]
        places = (min(int(word * rate), len(numbers) - 1) for word in range(max(1, round(len(numbers) / rate))))
        return "".join(f" {_VOCABULARY[numbers[place] % len(_VOCABULARY)]}" for place in places)


async def learn(target: Target, workload: Workload, silence: float) -> Dialect:
    """Find out by asking, with less and less, until the server answers.

    Raises:
        EndpointError: it cannot be reached, or refuses even the simplest request: what it said to the first one.
    """
    connection = Connection(Address.of(target.url), silence)
    refusals = []
    said = workload.conversation(0)[0].said
    try:
        for form, extras in _attempts(said):
            try:
                dialect = await _trial(connection, Dialect(target, form, extras, continuous=False), workload, said)
            except EndpointError as error:
                if error.status not in _NOT_UNDERSTOOD:
                    raise
                refusals.append(error)
                continue
            if dialect is not None:
                return dialect
    finally:
        connection.close()
    raise refusals[0]


def _attempts(said: Prompt) -> list[tuple[Form, bool]]:
    forms = [Form.IDS, Form.TEXT, Form.CHAT]
    if isinstance(said, str):
        forms = forms[1:]
    elif isinstance(said[0], dict):
        forms = forms[2:]
    return [(form, extras) for extras in (True, False) for form in forms]


async def _trial(connection: Connection, dialect: Dialect, workload: Workload, said: Prompt) -> Dialect | None:
    """What one request has shown; None: that conversations cannot go on like this."""
    made_up = workload.ignore_eos
    if made_up:
        said = (FIRST_ID,) * (_IDS if dialect.form is Form.IDS else _WORDS)
    conversation = Conversation(dialect, workload, seed=0)
    path, body = conversation.request(Turn(said, _TOKENS))
    answer = Answer(Log(), keep=True)
    await stream(connection, path, body, answer)
    if conversation.keeps and dialect.form is Form.IDS and not answer.token_ids():
        return None
    counted = (answer.usage() or {}).get("prompt_tokens")
    in_words = made_up and dialect.form is not Form.IDS
    return replace(
        dialect, continuous=answer.counted_early, tokens_per_word=counted / _WORDS if in_words and counted else 1.0
    )


async def warm(connection: Connection, dialect: Dialect, workload: Workload) -> None:
    """Ask for what all conversations begin with, so that prefix caches have it, as they would after the first conversation.

    Raises:
        EndpointError: it was refused, broke off or failed.
    """
    if workload.system:
        path, body = Conversation(dialect, workload, seed=0).request(Turn(workload.shared, _WARMING))
        await stream(connection, path, body, Answer(Log()))


async def stream(connection: Connection, path: str, body: Mapping[str, Any], answer: Answer) -> None:
    """Ask, and take the whole answer.

    Raises:
        EndpointError: it was refused, broke off or failed.
    """
    response = await connection.ask("POST", path, body, answer.receive)
    if response.status != 200:
        raise connection.refusal("POST", path, response)
    try:
        answer.end()
    except AnswerError as error:
        raise connection.fault("POST", path, str(error)) from error
