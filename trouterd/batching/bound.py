"""Upper bounds of throughput: what no thresholds, nor any other policy, can exceed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from trouterd.batching.network import Floats, Network

_HALVINGS = 60


def ideal(network: Network, concurrency: int, shares: Sequence[float] | None = None) -> float:
    """Most steps/s of `concurrency` requests; times `network.tokens_per_step` for tokens/s.

    The least of: every model works at its best batch size without pause; no request ever waits, in batches as large as the flow
    enforces; models that share a GPU divide its time at best.

    Args:
        network: the deployment.
        concurrency: requests in flight, N.
        shares: of each model in all steps; None: in the long run. Give those that were measured to judge a finite run.
    """
    parts = np.array(network.shares if shares is None else shares)
    sizes = np.arange(1, concurrency + 1, dtype=np.float64)
    times = np.array([step_time.seconds(sizes) for step_time in network.step_times])
    per_step = parts * (times / sizes).min(axis=1)
    """Seconds that each model must run for one step of the whole, at best."""
    return min(
        float(1 / per_step.max()),
        _without_waiting(parts, times, sizes, network.handoff * network.handoffs_per_step(parts.tolist())),
        # One at a time is no better than time slices.
        _shared(per_step, (1.0,) * network.size if network.turns else network.contention),
    )


def _without_waiting(shares: Floats, times: Floats, sizes: Floats, away: float) -> float:
    """Requests that are in a step or, for `away` seconds per step, on their way are at most N; batches are as large as a model's
    flow in one step at least.

    With steps of a + c b seconds and flow x, batches have x (a + c b) requests at least, in the mean: b >= x a / (1 - c x).
    """
    lines = [_line_below(sizes, row) for row in times]
    concurrency = float(sizes[-1])

    def needed(rate: float) -> float:
        requests = rate * away
        for share, (base, slope) in zip(shares.tolist(), lines, strict=True):
            flow = share * rate
            if slope * flow >= 1:
                return float("inf")
            requests += flow * (base + slope * max(1.0, flow * base / (1 - slope * flow)))
        return requests

    low, high = 0.0, concurrency / (float(shares @ times.min(axis=1)) + away)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) <= concurrency else (low, middle)
    return high


def _line_below(sizes: Floats, times: Floats) -> tuple[float, float]:
    """Base and slope, both 0 or more, of a line that no step time lies below: with the mean slope, lowered until it fits."""
    slope = max(0.0, float(times[-1] - times[0]) / float(sizes[-1] - sizes[0])) if len(sizes) > 1 else 0.0
    slope = min(slope, float((times / sizes).min()))
    return float((times - slope * sizes).min()), slope


def _shared(per_step: Floats, contention: Sequence[float]) -> float:
    """What contention leaves: for all models together, and for every two of them."""
    together = range(len(contention))
    most = max(
        sum(1 / (1 + contention[model] * (count - 1)) for model in group)
        for count in range(1, len(contention) + 1)
        for group in combinations(together, count)
    )
    least = most / float(per_step.sum())
    for one, other in combinations(np.flatnonzero(per_step).tolist(), 2):
        speeds = 1 / (1 + contention[one]), 1 / (1 + contention[other])
        least = min(least, _two(float(per_step[one]), float(per_step[other]), *speeds))
    return least


def _two(first: float, second: float, first_speed: float, second_speed: float) -> float:
    """Most rounds per second of two models.

    Args:
        first: seconds of work that a round needs of one.
        second: of the other.
        first_speed: of the one while both run; 1 alone.
        second_speed: of the other while both run.
    """
    if first_speed + second_speed <= 1:
        return 1 / (first + second)
    # Both run until the one that needs less time that way is done, then the other alone.
    both = min(first / first_speed, second / second_speed)
    return 1 / (both + max(0.0, first - both * first_speed) + max(0.0, second - both * second_speed))
