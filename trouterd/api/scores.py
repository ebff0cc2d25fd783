"""Scores of whole prompts, for routes that decide once for an answer: given by clients, or by trained models that run here.

Trained models run in a thread of their own, one at a time: the workers, which decode, never wait for them, and this process
goes on streaming.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trouterd.api.catalog import Served
from trouterd.api.engine import RETRY_AFTER
from trouterd.api.errors import RequestError, invalid
from trouterd.api.schema import RouteOverride
from trouterd.config import Config, Route

if TYPE_CHECKING:
    from algorithms.prompt_scores import Classifier, MatrixFactorization

ALGORITHM = "query"
MOST_THREADS = 4
"""Of one classifier's arithmetic."""
REMEMBERED = 4096
"""Texts whose scores are kept."""
MOST_WAITING = 256
"""Texts that wait for their scores at once."""


class ScoreError(Exception):
    """A trained model that cannot be used; the message names route and file."""


class Scores:
    """The scores of requests.

    Args:
        config: its trained models are loaded, which takes seconds.

    Raises:
        ScoreError: a checkpoint that cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self._classifiers: dict[str, Classifier] = {}
        self._factorizations: dict[str, MatrixFactorization] = {}
        """By path."""
        self._known: dict[tuple[str, bytes], float] = {}
        """By path of the classifier and hash of the text, the oldest first."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score", initializer=_leave_cores)
        self._waiting = 0
        for name, route in config.routes.items():
            self._load(name, route)

    def _load(self, name: str, route: Route) -> None:
        source = _source(route.algorithm, route.params)
        if source not in ("classifier", "mf"):
            return
        # Imports torch, which other configurations need not wait for.
        from algorithms.prompt_scores import Classifier, MatrixFactorization
        from algorithms.registry import AlgorithmError, load, validate_params

        try:
            params: Any = validate_params(load(ALGORITHM), route.params, route.models)
            path = params.checkpoint
            if source == "mf":
                factors = self._factorizations[path] = MatrixFactorization(Path(path))
                factors.check_rows(params.strong, params.weak)
            elif path not in self._classifiers:
                self._classifiers[path] = Classifier(Path(path))
        except (AlgorithmError, ValueError, OSError) as error:
            raise ScoreError(f"routes.{name}.params: {error}") from error

    def check(self, config: Config) -> None:
        """See whether the live settings of a changed configuration fit what is loaded.

        Raises:
            ScoreError: they do not.
        """
        for name, route in config.routes.items():
            if _source(route.algorithm, route.params) == "mf":
                try:
                    self._factorizations[str(route.params["checkpoint"])].check_rows(**_rows(route.params))
                except ValueError as error:
                    raise ScoreError(f"routes.{name}.params: {error}") from error

    async def of(
        self,
        served: Served,
        given: RouteOverride,
        params: Mapping[str, float],
        count: int,
        text: Callable[[int], Awaitable[str]],
    ) -> list[float | None]:
        """One score per prompt; None where the route asks for none.

        Args:
            served: the route.
            given: what the request says of it.
            params: its overrides, checked.
            count: prompts of the request.
            text: what a prompt asks, by its number; called only where a model reads it.

        Raises:
            RequestError: 400, something is missing, superfluous or does not fit; 429, too many texts wait.
        """
        source = _source(served.algorithm, served.params)
        _check_given(served, "score", given.score is not None, source == "field")
        _check_given(served, "embedding", given.embedding is not None, source == "mf")
        if source == "classifier":
            path = str(served.params["checkpoint"])
            try:
                return [await self._classified(path, await text(number)) for number in range(count)]
            except ValueError as error:
                raise invalid(f"{error}; route '{served.name}' decides by it") from error
        if given.embedding is None:
            return [given.score] * count
        factors = self._factorizations[str(served.params["checkpoint"])]
        try:
            return [factors(given.embedding, **_rows({**served.params, **params}))] * count
        except ValueError as error:
            table = "route" if str(error).startswith("embedding") else "route.params"
            raise invalid(f"{table}.{error}", f"{table}.{str(error).partition(':')[0]}") from error

    async def _classified(self, path: str, text: str) -> float:
        key = path, hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        if key not in self._known:
            score = await self._ask(self._classifiers[path], text)
            while len(self._known) >= REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = score
        return self._known[key]

    async def _ask(self, classifier: Classifier, text: str) -> float:
        if self._waiting >= MOST_WAITING:
            message = f"{self._waiting} prompts wait for their scores; retry later"
            raise RequestError(429, "overloaded", message, retry_after=RETRY_AFTER)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, classifier, text)
        finally:
            self._waiting -= 1


def _leave_cores() -> None:
    """torch would take all of them from the workers, for every text."""
    import torch

    torch.set_num_threads(max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2)))


def _source(algorithm: str, params: Mapping[str, Any]) -> str:
    """Where the scores of a route come from; '' where it has none."""
    return str(params.get("source", "")) if algorithm == ALGORITHM else ""


def _rows(params: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(params[name]) for name in ("strong", "weak") if name in params}


def _check_given(served: Served, field: str, given: bool, needed: bool) -> None:
    if needed and not given:
        raise invalid(f"route.{field}: missing; route '{served.name}' decides by it", f"route.{field}")
    if given and not needed:
        raise invalid(f"route.{field}: route '{served.name}' does not read one", f"route.{field}")
