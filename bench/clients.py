"""Closed-loop clients: each asks again as soon as it has been answered, so that a fixed number of requests is always under way.

What is under way at the beginning is what would be there after hours: client i has (i + 1/2) / N of a conversation behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from bench.answer import Answer, Log
from bench.dialect import Conversation, Dialect, stream
from bench.endpoint import SILENCE, Address, Connection
from bench.workloads import Turn, Workload
from models.rng import Purpose, key

_TICK = 0.2
"""Seconds between two words of progress."""
_SEED_BITS = 31
"""Of a request's seed: every server takes so many."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where one client stands at one moment."""

    tokens: int
    """Of its answers that have ended."""
    models: Mapping[str, int]
    """Who wrote these, where the server says so."""
    handoffs: int
    """In these."""
    answer: Answer | None
    """That is coming in."""
    events: int
    """Of that one."""
    usage: Mapping[str, Any] | None
    """Of that one, where the server counts all the time."""

    def written(self, tokens_per_event: float) -> float:
        """Tokens that had come by then. What the server had not counted is part of what it counted at the answer's end.

        Args:
            tokens_per_event: for an answer whose end nobody has seen.
        """
        answer = self.answer
        if answer is None:
            return self.tokens
        if self.usage is not None:
            return self.tokens + float(self.usage["completion_tokens"])
        if answer.tokens is not None and answer.events:
            return self.tokens + answer.tokens * self.events / answer.events
        return self.tokens + self.events * tokens_per_event

    def by_model(self) -> Counter[str]:
        """The same for each model, of what has been counted."""
        return Counter(self.models) + Counter(route(self.usage).get("tokens", {}))

    def handed(self) -> int:
        """Hand-offs, of what has been counted."""
        return self.handoffs + int(route(self.usage).get("handoffs", 0))


@dataclass(slots=True)
class Client:
    """One of them, and what its answers came to that have ended."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """A token has come."""
    turns: int = 0
    """That it has asked."""
    tokens: int = 0
    events: int = 0
    handoffs: int = 0
    models: Counter[str] = field(default_factory=Counter)
    short: int = 0
    """Answers that have fewer tokens than they had to have."""
    answer: Answer | None = None
    """That is coming in."""

    def mark(self) -> Mark:
        """Where it stands."""
        answer = self.answer if self.answer is not None and self.answer.first else None
        usage = answer.usage() if answer is not None and answer.counted_early else None
        events = answer.events if answer is not None else 0
        return Mark(self.tokens, dict(self.models), self.handoffs, answer, events, usage)

    def ended(self, answer: Answer, least: int) -> None:
        """Count an answer that is complete; `least`: tokens that it had to have."""
        usage = answer.usage()
        self.short += (answer.tokens or 0) < least
        self.tokens += answer.tokens or 0
        self.events += answer.events
        self.handoffs += int(route(usage).get("handoffs", 0))
        self.models.update(route(usage).get("tokens", {}))
        self.answer = None
        self.begun.set()  # there are tokens without text, too


@dataclass(frozen=True, slots=True)
class Seen:
    """What all clients have seen between two moments."""

    seconds: float
    tokens: float
    models: Mapping[str, int]
    """Tokens by who wrote them, where the server says so."""
    handoffs: int | None
    """None where the server says nothing of them."""
    short: int
    """Answers that ended although they were to ignore their end."""
    first: Sequence[float]
    """Seconds to first tokens, as the following of what came between the two moments."""
    gaps: Sequence[float]
    whole: Sequence[float]
    """Seconds of whole answers."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """The first of the two moments."""

    now: float
    marks: Sequence[Mark]


class Clients:
    """All of them, as an async context manager that starts and stops them.

    Args:
        dialect: of the server they ask.
        workload: what they ask.
        count: how many there are.
        seed: of what their requests draw.
        silence: seconds without a byte after which an answer is given up.
    """

    def __init__(
        self, dialect: Dialect, workload: Workload, count: int, *, seed: int = 0, silence: float = SILENCE
    ) -> None:
        self._dialect = dialect
        self._workload = workload
        self._address = Address.of(dialect.target.url)
        self._seed = seed
        self._silence = silence
        self._numbers = itertools.count()
        self._clients = [Client() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self.log = Log()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(place)) for place in range(len(self._clients))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begun(self) -> None:
        """Wait until every client has had a token.

        Raises:
            EndpointError: one of them has failed.
        """
        waiting = asyncio.create_task(self._all_begun())
        try:
            await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            self._check()
        finally:
            waiting.cancel()

    async def during(self, seconds: float, progress: Callable[[float], None]) -> None:
        """Let them ask for so long; `progress` is told the seconds that have passed.

        Raises:
            EndpointError: one of them has failed.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while (passed := loop.time() - begin) < seconds:
            progress(passed)
            tick = min(_TICK, seconds - passed)
            await asyncio.wait(self._tasks, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
            self._check()
        progress(seconds)

    def begin(self) -> _Begin:
        """From here on."""
        self.log.clear()
        return _Begin(time.perf_counter(), [client.mark() for client in self._clients])

    def end(self, begin: _Begin) -> Seen:
        """Until here."""
        seconds = time.perf_counter() - begin.now
        pairs = [(mark, client.mark()) for mark, client in zip(begin.marks, self._clients, strict=True)]
        rate = self._tokens_per_event()
        models: Counter[str] = Counter()
        for before, after in pairs:
            models.update(after.by_model())
            models.subtract(before.by_model())
        return Seen(
            seconds=seconds,
            tokens=sum(after.written(rate) - before.written(rate) for before, after in pairs),
            models=models,
            handoffs=sum(after.handed() - before.handed() for before, after in pairs) if models else None,
            short=sum(client.short for client in self._clients),
            first=list(self.log.first),
            gaps=list(self.log.gaps),
            whole=list(self.log.whole),
        )

    def _tokens_per_event(self) -> float:
        """Of all answers that have ended; 1 before the first one."""
        events = sum(client.events for client in self._clients)
        return sum(client.tokens for client in self._clients) / events if events else 1.0

    async def _all_begun(self) -> None:
        for client in self._clients:
            await client.begun.wait()

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()  # they have no end but a fault

    async def _run(self, place: int) -> None:
        client, connection = self._clients[place], Connection(self._address, self._silence)
        try:
            while True:
                number = next(self._numbers)
                turns = self._workload.conversation(number) if client.turns else self._begun(number, place)
                conversation = Conversation(self._dialect, self._workload, request_seed(self._seed, number))
                for turn in turns:
                    path, body = conversation.request(turn)
                    client.turns += 1
                    client.answer = answer = Answer(
                        self.log, keep=conversation.keeps, whole=turn.whole, begun=client.begun.set
                    )
                    await stream(connection, path, body, answer)
                    client.ended(answer, turn.max_tokens if self._workload.ignore_eos else 0)
                    if conversation.keeps:
                        conversation.answered(answer)
        finally:
            connection.close()

    def _begun(self, number: int, place: int) -> Sequence[Turn]:
        """A client's first conversation is under way already: all ages are there from the beginning, as they will be ever after."""
        return self._workload.midway(number, (place + 0.5) / len(self._clients))


def request_seed(seed: int, number: int) -> int:
    """Of the requests of a conversation: those of two seeds, or of two numbers, have nothing in common."""
    return key(seed, 0, number, Purpose.USER) >> (64 - _SEED_BITS)


def route(usage: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What a usage says of routing; empty for servers that do none."""
    found = (usage or {}).get("route")
    return found if isinstance(found, Mapping) else {}
