"""Where the requests of a simulation go after each step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from trouterd.batching.network import Matrix

_BLOCK = 4096
"""Random numbers that are drawn at a time."""


class Workload(Protocol):
    """What happens to each of a fixed number of requests."""

    @property
    def requests(self) -> int:
        """How many there are; all are ready at the start."""
        ...

    def start(self, request: int) -> int:
        """The model that takes its first step."""
        ...

    def move(self, request: int, model: int) -> int | None:
        """Where it goes after a step on `model`; None: it has ended."""
        ...


class MarkovWorkload:
    """Requests without end that move by a routing matrix: runs are geometric, as the throughput model assumes.

    Args:
        routing: rows of probabilities, as in `Network`.
        requests: in flight all the time.
        seed: of the moves; the same seed and the same order of steps give the same moves.
    """

    def __init__(self, routing: Matrix, requests: int, seed: int) -> None:
        self.requests = requests
        self._limits = [list(accumulate(row))[:-1] for row in routing]
        self._random = np.random.default_rng(seed)
        self._draws: list[float] = []

    def start(self, request: int) -> int:  # noqa: ARG002 - the protocol's
        """The entry."""
        return 0

    def move(self, request: int, model: int) -> int:  # noqa: ARG002 - the protocol's
        """Drawn from the model's row."""
        if not self._draws:
            self._draws = self._random.random(_BLOCK).tolist()
        return bisect_right(self._limits[model], self._draws.pop())


class ScriptWorkload:
    """Requests whose steps are given.

    Args:
        scripts: for each request the models that take its steps, in order; not empty.
    """

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        if not all(scripts):
            raise ValueError("every request needs one step or more")
        self.requests = len(scripts)
        self._scripts = scripts
        self._taken = [0] * len(scripts)

    def start(self, request: int) -> int:
        """The first model of its script."""
        return self._scripts[request][0]

    def move(self, request: int, model: int) -> int | None:  # noqa: ARG002 - the protocol's
        """The next model of its script."""
        self._taken[request] += 1
        script, taken = self._scripts[request], self._taken[request]
        return script[taken] if taken < len(script) else None
