"""One point of a frontier: all questions of a task, asked of one model name through a daemon's socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.frontier_fault import FrontierError
from bench.frontier_judge import is_right
from bench.frontier_sweeps import Value
from bench.frontier_task import Question, Task

_SILENCE = 600.0
"""Seconds that one answer may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a point asks for."""

    sweep: str
    """Its line in the plot."""
    model: str
    """As requests name it."""
    parameter: str = ""
    value: Value = 0.0
    reference: bool = False

    @property
    def setting(self) -> str:
        """For tables."""
        listed = self.value if isinstance(self.value, tuple) else (self.value,)
        return f"{self.parameter} = {' : '.join(f'{one:.4g}' for one in listed)}" if self.parameter else ""

    def params(self) -> dict[str, Any]:
        """`route.params` of a request."""
        if not self.parameter:
            return {}
        return {self.parameter: list(self.value) if isinstance(self.value, tuple) else self.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What came of it."""

    sweep: str
    setting: str
    value: Value
    reference: bool
    accuracy: float
    """Part of the questions, 0..1."""
    large_share: float
    """Part of the tokens that the large model wrote, 0..1."""
    handoffs_per_100: float
    """Tokens; both directions."""
    tokens_per_second: float
    """Output tokens of all streams together."""
    large_forwards: float
    """Forward passes of the large model with rows of an answer, prefill included: mean of the answers."""
    tokens_per_answer: float


@dataclass(frozen=True, slots=True)
class Served:
    """A route or a single model of a daemon."""

    models: tuple[str, ...]
    algorithm: str


class Daemon:
    """Asks one daemon over its unix socket. Use as an async context manager.

    Args:
        socket: path of the socket.
        streams: requests in flight.
    """

    def __init__(self, socket: Path, streams: int) -> None:
        self._socket = socket
        self._streams = streams

    async def __aenter__(self) -> Daemon:
        connector = aiohttp.UnixConnector(path=str(self._socket), limit=self._streams)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE)
        self._session = aiohttp.ClientSession("http://trouterd", connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def served(self) -> dict[str, Served]:
        """Every route and single model by name.

        Raises:
            FrontierError: no daemon answers.
        """
        cards = await self._request("GET", "/v1/models", None)
        return {
            card["id"]: Served(tuple(card["route"]["models"]), card["route"]["algorithm"]) for card in cards["data"]
        }

    async def measure(self, asked: Asked, task: Task, large: str, done: Callable[[], None]) -> Point:
        """Ask all questions, `streams` at a time, greedily; `done` is called after each answer.

        Raises:
            FrontierError: no daemon answers, or it refuses a request or fails it.
        """
        waiting = iter(enumerate(task.questions))
        answers: list[tuple[bool, dict[str, Any]]] = []

        async def stream() -> None:
            for number, question in waiting:
                answers.append(await self._answer(asked, task, question, number))
                done()

        begin = time.perf_counter()
        streams = [asyncio.create_task(stream()) for _ in range(self._streams)]
        try:
            await asyncio.gather(*streams)
        finally:
            for one in streams:
                one.cancel()
        return _point(asked, answers, large, time.perf_counter() - begin)

    async def _answer(self, asked: Asked, task: Task, question: Question, seed: int) -> tuple[bool, dict[str, Any]]:
        """Whether it is right, and its usage."""
        body = {**question.body, "model": asked.model, "max_tokens": task.max_tokens, "temperature": 0, "seed": seed}
        if params := asked.params():
            body["route"] = {"params": params}
        answer = await self._request("POST", question.path, body)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return is_right(task.judge, text or "", question.answer), answer["usage"]

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        model = body["model"] if body else path
        try:
            async with self._session.request(method, path, json=body) as response:
                if response.status != 200:
                    raise FrontierError(f"{model}: HTTP {response.status}: {await response.text()}")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FrontierError(
                f"no answer from the daemon at {self._socket}: {error or type(error).__name__}"
            ) from error


def _point(asked: Asked, answers: Sequence[tuple[bool, Mapping[str, Any]]], large: str, seconds: float) -> Point:
    usages = [usage for _, usage in answers]
    routes = [usage["route"] for usage in usages]
    tokens = max(1, sum(usage["completion_tokens"] for usage in usages))
    return Point(
        sweep=asked.sweep,
        setting=asked.setting,
        value=asked.value,
        reference=asked.reference,
        accuracy=sum(right for right, _ in answers) / len(answers),
        large_share=sum(route["tokens"].get(large, 0) for route in routes) / tokens,
        handoffs_per_100=100 * sum(route["handoffs"] for route in routes) / tokens,
        tokens_per_second=tokens / seconds,
        large_forwards=sum(route["forwards"].get(large, 0) for route in routes) / len(answers),
        tokens_per_answer=tokens / len(answers),
    )
