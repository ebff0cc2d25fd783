"""All thresholds worth a look for one number of requests, each judged by the best method that can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from trouterd.batching.chain import ChainError, solve
from trouterd.batching.launch import feasible
from trouterd.batching.network import Network
from trouterd.batching.policies import constant
from trouterd.batching.predictor import WHOLE, Predictor
from trouterd.batching.search import all_feasible, frugal, search
from trouterd.batching.simulator import simulate
from trouterd.batching.workload import MarkovWorkload

Method = Literal["exact", "reduced", "simulated"]

EXACT = 6
"""Requests up to which every feasible set of thresholds is judged, by the exact chain where it has few enough states."""
_EXACT_STATES = 6_000
_EXACT_MODELS = 3
"""Of more models there are too many sets of thresholds even for few requests."""
_MOST_PARTS = 128
"""Sets of a grid, at most: each is a simulation."""
_SIMULATED_STEPS = 12_000
_SEED = 0


@dataclass(frozen=True)
class Judged:
    """One set of thresholds."""

    thresholds: tuple[int, ...]
    tokens_per_second: float
    """Committed output tokens of all requests."""
    method: Method


@dataclass(frozen=True)
class Survey:
    """Everything that was judged."""

    judged: tuple[Judged, ...]
    best: Judged
    """The smallest thresholds within half a percent of the highest throughput."""
    eager: Judged
    """Thresholds of 1."""


def survey(network: Network, active: int, max_batch: int | None = None) -> Survey:
    """Judge all feasible thresholds for up to EXACT requests on two or three models, and the candidates of a search otherwise.

    The exact chain goes first. What has too many states for it goes to the reduction, or, where three or more models slow each
    other down or one of them beside the slowest is to wait, to the simulator (about 1 % of noise).

    Args:
        network: the deployment.
        active: requests in flight.
        max_batch: most requests of a batch.
    """
    predictor = Predictor(network, active)
    ones = (1,) * network.size
    judged = {found: _judge(predictor, active, found) for found in _candidates(predictor, active, max_batch)}
    best = frugal({thresholds: result.tokens_per_second for thresholds, result in judged.items()})
    return Survey(tuple(judged.values()), judged[best], judged[ones])


def _candidates(predictor: Predictor, active: int, max_batch: int | None) -> Iterable[tuple[int, ...]]:
    network = predictor.network
    if active <= EXACT and network.size <= _EXACT_MODELS:
        return all_feasible(network.size, active, max_batch)
    if predictor.reliable:
        return [thresholds for thresholds, _ in search(predictor, active, max_batch).tried]
    return _coarse(network.size, active, max_batch)


def _coarse(models: int, active: int, max_batch: int | None) -> Sequence[tuple[int, ...]]:
    """Eighths, quarters and halves of the requests for every model, and for each model in turn what the others leave."""
    most = active if max_batch is None else min(active, max_batch)
    wanted = [1, active // 2, active // 4, active // 8]
    parts = sorted({min(most, max(1, part)) for part in wanted[: max(1, int(_MOST_PARTS ** (1 / models)))]})
    found = set(product(parts, repeat=models))
    for others in product(parts, repeat=models - 1):
        rest = min(most, max(1, active + models - 1 - sum(others)))
        found |= {(*others[:model], rest, *others[model:]) for model in range(models)}
    return sorted(thresholds for thresholds in found if feasible(thresholds, active))


def _judge(predictor: Predictor, active: int, thresholds: tuple[int, ...]) -> Judged:
    network = predictor.network
    if active <= EXACT and not network.turns:
        try:
            result = solve(network, active, thresholds, most=_EXACT_STATES)
        except ChainError:
            pass
        else:
            return Judged(thresholds, result.tokens_per_second, "exact")
    if predictor.covers(thresholds):
        steps = predictor.steps_per_second(active, thresholds)
        method: Method = "exact" if network.turns and active <= WHOLE else "reduced"
        return Judged(thresholds, steps * network.tokens_per_step, method)
    workload = MarkovWorkload(network.routing, active, _SEED)
    outcome = simulate(network, constant(thresholds), workload, _SIMULATED_STEPS)
    return Judged(thresholds, outcome.tokens_per_second, "simulated")
