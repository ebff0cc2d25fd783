"""Thresholds for runs that are not geometric: lengths drawn from what was seen, judged by the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trouterd.batching.launch import clamp
from trouterd.batching.network import Floats, Matrix, Network
from trouterd.batching.policies import constant
from trouterd.batching.simulator import simulate

_STEPS = 6_000
_SEEDS = (0, 1)
_BETTER = 1.03
"""What another set of thresholds must promise, with every seed."""
_GEOMETRIC = (0.6, 1.7)
"""Variance over that of geometric runs of the same mean, between which runs pass for geometric."""
_SHORT = 1.2
"""Mean length below which the shape of runs does not matter."""
_SEEN = 50
"""Runs from which on their shape is known."""

Runs = Mapping[int, float]
"""Weight by length."""


def geometric(runs: Runs) -> bool:
    """Whether the throughput model's assumption holds well enough, or too little is known to say."""
    lengths, weights = np.array(list(runs)), np.array(list(runs.values()))
    if weights.sum() < _SEEN:
        return True
    mean = float(np.average(lengths, weights=weights))
    if mean < _SHORT:
        return True
    variance = float(np.average((lengths - mean) ** 2, weights=weights))
    return _GEOMETRIC[0] <= variance / (mean * (mean - 1)) <= _GEOMETRIC[1]


class RunWorkload:
    """Requests without end whose runs have lengths that were seen; who comes next is drawn from the routing matrix.

    Args:
        runs: per model; of one that is never left they do not matter.
        routing: as in `Network`.
        requests: in flight all the time.
        seed: of everything drawn.
    """

    def __init__(self, runs: Sequence[Runs], routing: Matrix, requests: int, seed: int) -> None:
        self.requests = requests
        self._random = np.random.default_rng(seed)
        self._lengths = [list(lengths) for lengths in runs]
        # Summed once: there may be thousands of lengths, and thousands of draws.
        self._odds = [np.cumsum(list(lengths.values())) / sum(lengths.values()) for lengths in runs]
        self._next: list[Floats | None] = []
        """Per model; None: nobody leaves it any more."""
        for model, row in enumerate(routing):
            leaving = np.array([0.0 if other == model else share for other, share in enumerate(row)])
            self._next.append(leaving / leaving.sum() if leaving.any() else None)
        self._left = [0] * requests
        # Somewhere within a run, or all would move in step from the start.
        for request in range(requests):
            self._left[request] = int(self._random.integers(1, self._draw(0) + 1))

    def _draw(self, model: int) -> int:
        # A file of an earlier version may hold runs without a step.
        lengths = self._lengths[model]
        drawn = int(np.searchsorted(self._odds[model], self._random.random(), side="right"))
        return max(1, lengths[min(drawn, len(lengths) - 1)])

    def start(self, request: int) -> int:  # noqa: ARG002 - the protocol's
        """The entry."""
        return 0

    def move(self, request: int, model: int) -> int:
        """Stay until the run is over."""
        self._left[request] -= 1
        odds = self._next[model]
        if self._left[request] > 0 or odds is None:
            return model
        target = int(self._random.choice(len(odds), p=odds))
        self._left[request] = self._draw(target)
        return target


def rates(network: Network, runs: Sequence[Runs], active: int, thresholds: Sequence[int]) -> list[float]:
    """Simulated tokens/s with each seed."""
    found = []
    for seed in _SEEDS:
        workload = RunWorkload(runs, network.routing, active, seed)
        outcome = simulate(network, constant(thresholds), workload, _STEPS)
        found.append(outcome.steps_per_second * network.tokens_per_step)
    return found


def best(
    network: Network, runs: Sequence[Runs], active: int, held: Sequence[int], planned: Sequence[int]
) -> tuple[int, ...]:
    """The thresholds to use: those in force, unless others are clearly better with every seed.

    Args:
        network: the deployment.
        runs: per model.
        active: requests in flight.
        held: thresholds in force.
        planned: the throughput model's.
    """
    standard = rates(network, runs, active, held)
    winner, most = tuple(held), sum(standard)
    for candidate in _candidates(network, active, planned):
        found = rates(network, runs, active, candidate)
        if sum(found) > most and all(rate > _BETTER * old for rate, old in zip(found, standard, strict=True)):
            winner, most = candidate, sum(found)
    return winner


def _candidates(network: Network, active: int, planned: Sequence[int]) -> list[tuple[int, ...]]:
    slow = network.slowest(active)
    found = {clamp(planned, active)}
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        threshold = max(1, round(part * active))
        alone = tuple(threshold if model == slow else 1 for model in range(network.size))
        found.add(clamp(alone, active))
        if network.size == 2 and any(network.contention):
            turns = tuple(threshold if model == slow else active + 1 - threshold for model in range(2))
            found.add(clamp(turns, active))
    return sorted(found)
