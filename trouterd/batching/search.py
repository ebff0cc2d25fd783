"""The best thresholds for a number of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from trouterd.batching.launch import clamp, feasible
from trouterd.batching.predictor import WHOLE, Predictor, rescaled

_SLACK = 0.005
"""Of the best throughput: smaller thresholds that come so close are preferred, since they make requests wait less."""
_DENSE = 8
_GROWTH = 1.2
_STRIDE = 3
_PARTS = 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4
"""Of all requests: candidates of a fast model that has to wait too."""
_FEW = 6


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    thresholds: tuple[int, ...]
    """One per model."""
    steps_per_second: float
    """Predicted."""
    eager_steps_per_second: float
    """Predicted for thresholds of 1."""
    tried: tuple[tuple[tuple[int, ...], float], ...]
    """All thresholds that were looked at, in order, with their predicted steps/s."""


def search(predictor: Predictor, active: int, max_batch: int | None = None) -> Found:
    """By the reduction: a coarse pass over candidates of the slow model, then the neighbours of the best.

    The fast model waits too where models slow each other down or take turns: eighths of the requests are tried for it, or
    everything up to 6.

    Args:
        predictor: of the network.
        active: requests in flight.
        max_batch: most requests of a batch, and so of a threshold.
    """
    ones = (1,) * predictor.network.size
    if (alone := predictor.trivial(active)) is not None:
        return Found(ones, alone, alone, ((ones, alone),))
    factor = max(1.0, active / WHOLE)
    size = min(active, WHOLE)
    most = size if max_batch is None else max(1, min(size, int(max_batch / factor)))
    rates: dict[tuple[int, int], float] = {}
    for fast in _fast_candidates(predictor, size, most):
        reduction = predictor.reduction(active, fast)
        candidates = _candidates(min(most, size + 1 - fast))
        found = _coarse_to_fine(reduction.steps_per_second, candidates)
        rates |= {(fast, slow): rate * factor for slow, rate in found.items()}
    tried = {
        clamp(predictor.join(*rescaled(pair, size, active)), active, max_batch): rate for pair, rate in rates.items()
    }
    best = frugal(tried)
    return Found(best, tried[best], rates[1, 1], tuple(sorted(tried.items())))


def all_feasible(models: int, active: int, max_batch: int | None = None) -> Iterable[tuple[int, ...]]:
    """Every set of thresholds that cannot deadlock, in order."""
    most = active if max_batch is None else min(active, max_batch)
    for thresholds in product(range(1, most + 1), repeat=models):
        if feasible(thresholds, active):
            yield thresholds


def frugal(rates: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    """Of the thresholds that are about as good as the best ones, those with the smallest sum."""
    enough = max(rates.values()) * (1 - _SLACK)
    return min(
        (thresholds for thresholds, rate in rates.items() if rate >= enough), key=lambda found: (sum(found), found)
    )


def _fast_candidates(predictor: Predictor, size: int, most: int) -> Sequence[int]:
    pair = predictor.pair
    if pair is None or predictor.network.size > 2:
        return (1,)
    if not predictor.network.turns and pair.fast_contention == pair.slow_contention == 0:
        return (1,)
    if size <= _FEW:
        return range(1, most + 1)
    return sorted({1, *(min(most, math.ceil(size * part)) for part in _PARTS)})


def _candidates(most: int) -> list[int]:
    """Every size up to 8, then steps of a fifth, and the largest."""
    sizes = list(range(1, min(most, _DENSE) + 1))
    while (size := max(sizes[-1] + 1, round(sizes[-1] * _GROWTH))) < most:
        sizes.append(size)
    return sizes if sizes[-1] >= most else [*sizes, most]


def _coarse_to_fine(rate: Callable[[int], float], candidates: Sequence[int]) -> dict[int, float]:
    coarse = sorted({*range(0, len(candidates), _STRIDE), len(candidates) - 1})
    rates = {candidates[index]: rate(candidates[index]) for index in coarse}
    best = max(coarse, key=lambda index: rates[candidates[index]])
    for index in range(max(0, best - _STRIDE + 1), min(len(candidates), best + _STRIDE)):
        if candidates[index] not in rates:
            rates[candidates[index]] = rate(candidates[index])
    return rates
