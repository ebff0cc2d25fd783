"""What the reduction needs: a fast server and a slow one. Three and more models are folded into that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trouterd.batching.network import Floats, Network, StepTime

_ROUNDS = 160
_DAMPING = 0.5
_NEVER = 1e-12
"""Share of steps below which a model is taken as left for good, and probability below which a move is taken as none."""


@dataclass(frozen=True)
class Pair:
    """The slowest model and everything else, as the reduction sees them.

    Attributes:
        fast: step time of the other model; of several ones, of the flow-equivalent server.
        slow: step time of the slowest model.
        there: probability that a step of the fast server ends at the slow one.
        back: the other way round.
        slow_share: of the slow model in all steps.
        fast_contention: as in `Network`.
        slow_contention: as in `Network`.
        slow_model: which model of the network it is.
        handoff: seconds of one, as in `Network`.
    """

    fast: StepTime
    slow: StepTime
    there: float
    back: float
    slow_share: float
    fast_contention: float
    slow_contention: float
    slow_model: int
    handoff: float = 0.0

    def zoomed(self, factor: float) -> Pair:
        """The same deployment with `factor` requests seen as one."""
        return Pair(
            self.fast.zoomed(factor),
            self.slow.zoomed(factor),
            self.there,
            self.back,
            self.slow_share,
            self.fast_contention,
            self.slow_contention,
            self.slow_model,
            self.handoff,
        )


def fold(network: Network, concurrency: int) -> Pair | int:
    """The network as a pair, for up to `concurrency` requests; or the index of its model, if only one is used in the long run.

    The models beside the slowest one become one server whose step time is n / X(n), with X(n) the steps/s of n requests that move
    among these models alone (flow equivalence); X(n) comes from a mean-field approximation with all thresholds 1.
    """
    used = [model for model, share in enumerate(network.shares) if share > _NEVER]
    if len(used) == 1:
        return used[0]
    slow = max(used, key=lambda model: (network.step_times[model].of(concurrency), model))
    others = [model for model in used if model != slow]
    routing = np.array(network.routing)
    shares = np.array(network.shares)[others]
    there = float(shares @ routing[others, slow] / shares.sum())
    back = float(1 - routing[slow, slow])
    if min(there, back) < _NEVER:
        return max(used, key=lambda model: network.shares[model])
    contention = network.contention[slow]
    if len(others) == 1:
        fast, fast_contention = network.step_times[others[0]], network.contention[others[0]]
    else:
        returns = routing[slow, others] / back
        inner = routing[np.ix_(others, others)] + np.outer(routing[others, slow], returns)
        group = _Group(network, others, shares / shares.sum(), np.diag(inner))
        sizes = np.arange(1, concurrency + 1, dtype=np.float64)
        rates, running = group.settle(sizes)
        fast = StepTime(tuple(zip(sizes.tolist(), (sizes / rates).tolist(), strict=True)))
        # Seen from outside the group is one model: what it does to the slow one, and that one to it, is averaged over its members.
        fast_contention = group.mean_contention()
        contention *= float(running[-1])
    return Pair(
        fast,
        network.step_times[slow],
        there,
        back,
        float(network.shares[slow]),
        fast_contention,
        contention,
        slow,
        network.handoff,
    )


class _Group:
    """Models among which requests move with all thresholds 1, in the mean field.

    A model's cycle is a step of k requests for D seconds, then idle time until the next arrival if none came meanwhile. Holds
    for all numbers of requests at once: arrays run over them.
    """

    def __init__(self, network: Network, models: list[int], shares: Floats, staying: Floats) -> None:
        self._step_times = [network.step_times[model] for model in models]
        self._contention = [network.contention[model] for model in models]
        self._shares, self._staying = shares, staying
        among = np.array(network.routing)[np.ix_(models, models)]
        self._away = network.handoff * float(shares @ (among.sum(axis=1) - np.diag(among)))
        """Seconds that a request is on its way within the group, per step."""

    def mean_contention(self) -> float:
        """Weighted by the time that single requests spend in each model."""
        weights = [share * step_time.of(1) for share, step_time in zip(self._shares, self._step_times, strict=True)]
        return float(np.average(self._contention, weights=weights))

    def settle(self, sizes: Floats) -> tuple[Floats, Floats]:
        """Steps/s of the group and mean number of its models that run while any does, for each number of requests."""
        alone = sum(share * step_time.of(1) for share, step_time in zip(self._shares, self._step_times, strict=True))
        rate = np.full_like(sizes, 1 / alone)
        batch = [np.ones_like(sizes) for _ in self._step_times]
        busy = [np.full_like(sizes, float(share)) for share in self._shares]
        for _ in range(_ROUNDS):
            held = rate * self._away
            running = np.sum(busy, axis=0)
            for index, step_time in enumerate(self._step_times):
                flow = self._shares[index] * rate
                arrivals = flow * (1 - self._staying[index])
                step = step_time.seconds(np.maximum(batch[index], 1.0))
                step = step * (1 + self._contention[index] * (running - busy[index]))
                found = (arrivals * step + batch[index] * self._staying[index]) / sizes
                idle = np.maximum(0.0, 1 - found) ** sizes / np.maximum(arrivals, _NEVER)
                cycle = step + idle
                held += (batch[index] * step + arrivals * step**2 / 2) / cycle
                batch[index] += _DAMPING * (np.minimum(sizes, flow * cycle) - batch[index])
                busy[index] += _DAMPING * (step / cycle - busy[index])
            rate *= (sizes / held) ** _DAMPING
        return rate, np.sum(busy, axis=0) / (1 - np.prod([1 - part for part in busy], axis=0))
