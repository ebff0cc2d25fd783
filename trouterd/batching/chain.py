"""The exact throughput of thresholds: a Markov chain over the moments at which batches end.

Source: the throughput model of TokenRouter (arXiv 2610.12242, appendix D). Its states explode with the number of requests and of
distinct step times; `reduction` is for everything larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from trouterd.batching.launch import feasible
from trouterd.batching.network import Floats, Matrix, Network

MOST_STATES = 20_000
_GRID_ERRORS = 1e-9, 1e-3
"""Relative, of step times that a grid meets; the first that some grid keeps to is asked for."""
_GRIDS = range(10, 101)
_FINE_GRIDS = range(50, 201)
_ROUND = 50
"""Products of law and transition matrix between two checks for convergence."""
_EDGE_PRODUCTS = 200_000_000
"""At which to give up: about a second."""
_OVERHEAD = 2_000
"""Edges that a product costs as much as in addition to its own."""
_FEW_PRODUCTS = 2_000
_FEW_STATES = 2_000
"""Chains of so many are solved as linear equations if they have not settled after those products: where moves are rare, say."""
_SETTLED = 1e-12
_UNSETTLED = 1e-9
"""Largest error of a solution's probabilities."""

Counts = tuple[int, ...]
State = tuple[Counts, Counts, Counts]
"""Per model: requests that wait, requests that run, quanta of work that the running batch has left."""


class ChainError(ValueError):
    """Too many states, or a chain that settles too slowly: take the reduction or the simulator."""


@dataclass(frozen=True)
class ChainResult:
    """Of one set of thresholds."""

    steps_per_second: float
    """Requests' steps of all models."""
    tokens_per_second: float
    """Committed output tokens."""
    states: int


def solve(
    network: Network,
    concurrency: int,
    thresholds: Sequence[int],
    *,
    quantum: float | None = None,
    most: int = MOST_STATES,
) -> ChainResult:
    """Stationary throughput of `concurrency` requests under constant thresholds.

    Exact where all step times are multiples of the quantum and all contention factors are equal. With unlike factors the work
    that is left of a running batch is rounded to the quantum at every event. Hand-offs of two models that take time are a third
    place between the slower one and the other, where a batch stays for twice that time, rounded to the quantum: a clock of the
    other model that is late by one hand-off sees it like that.

    Args:
        network: the deployment.
        concurrency: requests in flight, all of them all the time.
        thresholds: one per model, feasible.
        quantum: seconds that step times are rounded to; None: the coarsest part of the fastest step that fits all of them.
        most: states at which to give up.

    Raises:
        ChainError: more than `most` states, no convergence, or hand-offs that take time between three or more models or longer than
            half a step of the slower one.
        ValueError: thresholds that can deadlock.
    """
    if len(thresholds) != network.size or not feasible(thresholds, concurrency):
        raise ValueError(
            f"thresholds {list(thresholds)} are not feasible for {concurrency} requests on {network.size} models"
        )
    space = _Space(network, concurrency, thresholds, quantum)
    space.explore(most)
    return space.solve()


class _Space:
    """All states that can be reached from the start, each right after the launches of its moment."""

    def __init__(self, network: Network, concurrency: int, thresholds: Sequence[int], quantum: float | None) -> None:
        self._network, self._thresholds = network, tuple(thresholds)
        sizes = np.arange(1, concurrency + 1, dtype=np.float64)
        times = np.array([step_time.seconds(sizes) for step_time in network.step_times])
        alike = len(set(network.contention)) == 1
        self._quantum = quantum or _quantum(times, _GRIDS if alike else _FINE_GRIDS)
        self._work = np.maximum(1, np.rint(times / self._quantum)).astype(int).tolist()
        self._tokens = [float(np.dot(*pair)) for pair in zip(network.routing, network.commit, strict=True)]
        routing = network.routing
        if network.handoff:
            routing = self._add_way(network)
        self._moves = [{size: list(_multinomial(size, row)) for size in range(1, concurrency + 1)} for row in routing]
        start = [0] * len(routing)
        start[0] = concurrency
        none = (0,) * len(routing)
        self._states = [self._launch(tuple(start), none, none)]
        self._numbers = {self._states[0]: 0}
        self._edges: list[tuple[int, int, float]] = []
        self._seconds: list[float] = []
        self._rewards: list[tuple[int, float]] = []

    def _add_way(self, network: Network) -> Matrix:
        """A place in which every batch that leaves the slower model is on its way; returns the routing with it."""
        if network.size > 2:
            raise ChainError("hand-offs between three or more models take time")
        slow = int(self._work[1][0] >= self._work[0][0])
        way = max(1, round(2 * network.handoff / self._quantum))
        if way > min(self._work[slow]):
            raise ChainError("a batch is on its way for longer than the step that brings the next one")
        self._work.append([way] * len(self._work[slow]))
        self._thresholds = (*self._thresholds, 1)
        there, back = network.routing[1 - slow], network.routing[slow]
        rows = [(*there, 0.0), (*there, 0.0), tuple(float(place == 1 - slow) for place in range(3))]
        rows[slow] = (*(share if model == slow else 0.0 for model, share in enumerate(back)), back[1 - slow])
        return tuple(rows)

    def explore(self, most: int) -> None:
        """Breadth first."""
        for number, state in enumerate(self._states):  # which grows meanwhile
            if len(self._states) > most:
                raise ChainError(f"more than {most} states")
            self._expand(number, state)

    def _expand(self, number: int, state: State) -> None:
        waiting, running, work = state
        busy = [model for model, batch in enumerate(running) if batch]
        slow = self._slowed(busy)
        hold = min(work[model] * slow[model] for model in busy)
        left = {model: work[model] - round(hold / slow[model]) for model in busy}
        ended = [model for model in busy if left[model] <= 0]
        self._seconds.append(hold * self._quantum)
        steps = [(running[model], self._tokens[model]) for model in ended if model < self._network.size]
        self._rewards.append((sum(count for count, _ in steps), sum(count * tokens for count, tokens in steps)))
        batches = tuple(0 if model in ended else batch for model, batch in enumerate(running))
        rest = tuple(max(0, left.get(model, 0)) for model in range(len(running)))
        for moves in product(*(self._moves[model][running[model]] for model in ended)):
            chance = math.prod(probability for probability, _ in moves)
            counts = tuple(map(sum, zip(waiting, *(arrivals for _, arrivals in moves), strict=True)))
            after = self._launch(counts, batches, rest)
            target = self._numbers.setdefault(after, len(self._states))
            if target == len(self._states):
                self._states.append(after)
            self._edges.append((number, target, chance))

    def _slowed(self, busy: Sequence[int]) -> dict[int, float]:
        """By which factor each of these is slowed; requests on their way are not and slow nobody."""
        models = [model for model in busy if model < self._network.size]
        factors = {model: 1 + self._network.contention[model] * (len(models) - 1) for model in models}
        return dict.fromkeys(busy, 1.0) | factors

    def _launch(self, waiting: Counts, running: Counts, work: Counts) -> State:
        after = [list(waiting), list(running), list(work)]
        for model, threshold in enumerate(self._thresholds):
            if running[model] == 0 and waiting[model] >= threshold:
                batch = waiting[model]
                after[0][model], after[1][model], after[2][model] = 0, batch, self._work[model][batch - 1]
        return tuple(after[0]), tuple(after[1]), tuple(after[2])

    def solve(self) -> ChainResult:
        """Throughput from the stationary law, found by power iteration from the start, or as the solution of its equations.

        The chain is made lazy, so that periods do no harm; nor do states that are left for good.
        """
        sources, targets = (np.array([edge[side] for edge in self._edges]) for side in (0, 1))
        chances = np.array([chance for _, _, chance in self._edges])
        seconds = np.array(self._seconds)
        steps, tokens = np.array(self._rewards).T
        law = np.zeros(len(self._states))
        law[0] = 1.0
        before = 0.0
        for count in range(0, _EDGE_PRODUCTS // (_OVERHEAD + len(chances)), _ROUND):
            if count >= _FEW_PRODUCTS and len(law) <= _FEW_STATES:
                law = self._solution(sources, targets, chances)
                break
            for _ in range(_ROUND):
                law = (law + np.bincount(targets, law[sources] * chances, len(law))) / 2
            rate = float(law @ steps / (law @ seconds))
            if abs(rate - before) <= _SETTLED * rate:
                break
            before = rate
        else:
            raise self._unsettled()
        return ChainResult(float(law @ steps / (law @ seconds)), float(law @ tokens / (law @ seconds)), len(law))

    def _solution(self, sources: NDArray[np.int64], targets: NDArray[np.int64], chances: Floats) -> Floats:
        """The law that the moves leave as it is, if there is only one."""
        equations = -np.eye(len(self._states))
        np.add.at(equations, (targets, sources), chances)
        equations[-1] = 1.0
        right = np.zeros(len(equations))
        right[-1] = 1.0
        try:
            law = np.linalg.solve(equations, right)
        except np.linalg.LinAlgError as error:
            raise self._unsettled() from error
        left = np.bincount(targets, law[sources] * chances, len(law)) - law
        if law.min() < -_UNSETTLED or not np.abs(left).max() < _UNSETTLED:
            raise self._unsettled()
        return np.asarray(law)

    def _unsettled(self) -> ChainError:
        return ChainError(f"{len(self._states)} states do not settle: requests keep to groups that hardly ever mix")


def _quantum(times: Floats, parts: range) -> float:
    """The coarsest grid that meets all step times, or the one that meets them best."""
    fastest = float(times[:, 0].min())
    grids = fastest / np.array(parts)
    errors = [float(np.max(np.abs(np.rint(times / grid) * grid / times - 1))) for grid in grids]
    for most in _GRID_ERRORS:
        fitting = [grid for grid, error in zip(grids, errors, strict=True) if error < most]
        if fitting:
            return float(fitting[0])
    return float(grids[int(np.argmin(errors))])


def _multinomial(size: int, row: Sequence[float]) -> Iterator[tuple[float, Counts]]:
    """All ways in which `size` requests may move by one row, with their probabilities."""
    if len(row) == 1:
        yield row[0] ** size, (size,)
        return
    for here in range(size + 1):
        chance = math.comb(size, here) * row[0] ** here
        if chance > 0:
            for rest, counts in _multinomial(size - here, row[1:]):
                if rest > 0:
                    yield chance * rest, (here, *counts)
