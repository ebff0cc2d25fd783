"""Thresholds for every number of active requests: what workers launch by and what a controller recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trouterd.batching.bound import ideal
from trouterd.batching.launch import clamp
from trouterd.batching.network import Network
from trouterd.batching.predictor import Predictor
from trouterd.batching.search import search

_DENSE = 8
_GROWTH = 1.25


@dataclass(frozen=True)
class BatchingPlan:
    """Thresholds and predictions for n = 1, 2, ... active requests; entry n - 1 of every list is for n.

    `lists[i]` is the list B[n] of model i. A worker launches when `launch.reason(ready, lists[i][n - 1], ...)` says so.
    Rates are committed output tokens per second of all requests together. All thresholds of one n are feasible together; a
    controller that mixes lists of two plans, or takes some from a user, has to pass them through `launch.clamp` again.
    """

    network: Network
    lists: tuple[tuple[int, ...], ...]
    """Per model."""
    predicted: tuple[float, ...]
    """Tokens/s under these thresholds."""
    eager: tuple[float, ...]
    """Tokens/s under thresholds of 1."""
    ideal: tuple[float, ...]
    """Tokens/s that no policy can exceed."""

    @property
    def concurrency(self) -> int:
        """The largest n of the lists."""
        return len(self.predicted)

    def thresholds(self, active: int) -> tuple[int, ...]:
        """One per model; beyond the end of the lists their last ones hold."""
        index = min(max(active, 1), self.concurrency) - 1
        return tuple(thresholds[index] for thresholds in self.lists)


def plan(network: Network, concurrency: int, max_batch: int | None = None) -> BatchingPlan:
    """The best thresholds for 1..`concurrency` active requests, by the reduction.

    Pure and deterministic; up to 0.15 s of one core for 256 requests, so call it in a thread. Numbers of requests above 8 are
    searched in steps of 25 %; between them thresholds and rates are interpolated. Of three and more models only the slowest waits;
    where they also slow each other down, predictions are up to a fifth too low and `survey.survey` finds better thresholds.

    Args:
        network: the deployment, with step times as measured without contention.
        concurrency: the most active requests that the lists cover.
        max_batch: most requests of a batch, of every model.

    Raises:
        ValueError: no request, or no room in a batch.
    """
    if concurrency < 1 or (max_batch is not None and max_batch < 1):
        raise ValueError(f"concurrency {concurrency} and max_batch {max_batch} must be 1 or more")
    predictor = Predictor(network, concurrency)
    nodes = _nodes(concurrency)
    found = [search(predictor, active, max_batch) for active in nodes]
    counts = range(1, concurrency + 1)

    def between(values: Sequence[float]) -> list[float]:
        line: list[float] = np.interp(counts, nodes, values).tolist()
        return line

    thresholds = np.transpose(
        [between([result.thresholds[model] for result in found]) for model in range(network.size)]
    )
    # Rounded as running sums, which keeps their total: it is what tells models that take turns from models that overlap.
    totals = np.floor(np.cumsum(thresholds, axis=1) + 0.5).astype(int)
    rows = [clamp(row, n, max_batch) for n, row in zip(counts, np.diff(totals, prepend=0).tolist(), strict=True)]
    tokens = network.tokens_per_step
    return BatchingPlan(
        network,
        lists=tuple(zip(*rows, strict=True)),
        predicted=tuple(rate * tokens for rate in between([result.steps_per_second for result in found])),
        eager=tuple(rate * tokens for rate in between([result.eager_steps_per_second for result in found])),
        ideal=tuple(rate * tokens for rate in between([ideal(network, active) for active in nodes])),
    )


def _nodes(concurrency: int) -> list[int]:
    nodes = list(range(1, min(concurrency, _DENSE) + 1))
    while (count := int(np.ceil(nodes[-1] * _GROWTH))) < concurrency:
        nodes.append(count)
    return nodes if nodes[-1] == concurrency else [*nodes, concurrency]
