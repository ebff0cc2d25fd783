"""Binomial laws for many counts at once."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from trouterd.batching.network import Floats


def pmf(trials: NDArray[np.int64], probability: Floats | float, width: int) -> Floats:
    """Row r: probabilities of 0..width successes in `trials[r]` trials of probability `probability[r]`; trials <= width."""
    count = trials[:, None]
    chance = np.broadcast_to(np.asarray(probability, dtype=np.float64), trials.shape)[:, None]
    hits = np.arange(width + 1)[None, :]
    possible = hits <= count
    misses = np.where(possible, count - hits, 0)
    factorials = _log_factorials(width)
    log_ways = factorials[count] - factorials[np.where(possible, hits, 0)] - factorials[misses]
    # Powers rather than logarithms of the chances: 0^0 is 1.
    return np.where(possible, np.exp(log_ways) * chance**hits * (1 - chance) ** misses, 0.0)


@cache
def _log_factorials(most: int) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
