"""Throughput of two models that take turns, one step at a time: a chain over their launches.

Its state is which model launches and how many requests it takes; all others wait at the other model then, or reach it during the
step. When the step has ended,

- the other model is next if it had enough ready before, and finds those who have just come, too: a turn takes as long to pass on as
  a hand-off does;
- or the same model is, at once, if enough of its batch stay;
- or the other one is, as soon as those who have just left are there.

So it is in the daemon with `batching.overlap = false` (`trouterd/worker/turn.py`). Exact, as far as hand-offs take less time than
any step.
"""

from __future__ import annotations

import numpy as np

from trouterd.batching.binomial import pmf
from trouterd.batching.network import Floats, StepTime, stationary
from trouterd.batching.pair import Pair


class TurnChain:
    """A pair with N requests and one threshold of the fast model; answers for every threshold of the slow one.

    States are (model, batch): the fast model with 1..N requests, then the slow one.

    Args:
        pair: both models; contention does not matter.
        concurrency: N.
        fast_threshold: of the fast model.
    """

    def __init__(self, pair: Pair, concurrency: int, fast_threshold: int = 1) -> None:
        self._pair, self._concurrency, self._fast_threshold = pair, concurrency, fast_threshold
        self._batches = np.arange(1, concurrency + 1)
        self._leave = [pmf(self._batches, chance, concurrency) for chance in (pair.there, pair.back)]
        """By model: [batch, requests of it that leave]."""

    def steps_per_second(self, slow_threshold: int) -> float:
        """Requests' steps of both models."""
        thresholds = self._fast_threshold, slow_threshold
        moves, passes = zip(*(self._after(model, thresholds) for model in range(2)), strict=True)
        law = stationary(np.concatenate(moves), np.eye(2 * self._concurrency)[self._concurrency - 1])
        seconds = np.concatenate([self._seconds(time) for time in (self._pair.fast, self._pair.slow)])
        seconds += self._pair.handoff * np.concatenate(passes)
        return float(law @ np.tile(self._batches, 2) / (law @ seconds))

    def _seconds(self, time: StepTime) -> Floats:
        return time.seconds(self._batches.astype(np.float64))

    def _after(self, model: int, thresholds: tuple[int, int]) -> tuple[Floats, Floats]:
        """What follows each batch of a model.

        Returns:
            [batch, state] probabilities, and [batch] that the turn passes on and somebody has left.
        """
        size = self._concurrency
        batch, left = self._batches[:, None], np.arange(size + 1)[None, :]
        others, stay = size - batch, batch - left
        chance = np.where(stay >= 0, self._leave[model], 0.0)
        passes = (others >= thresholds[1 - model]) | (stay < thresholds[model])
        target = np.where(passes, (1 - model) * size + others + left, model * size + stay) - 1
        moves = np.zeros((size, 2 * size))
        rows = np.broadcast_to(batch - 1, chance.shape)
        there = chance > 0
        np.add.at(moves, (rows[there], target[there]), chance[there])
        return moves, np.asarray((chance * (passes & (left > 0))).sum(axis=1))
