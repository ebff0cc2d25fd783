"""A simulated daemon with the controller at work in it: what is measured depends on what it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from trouterd.batching.controller import Controller
from trouterd.batching.launch import clamp
from trouterd.batching.network import Network
from trouterd.batching.policies import Instant, constant
from trouterd.batching.report import Report, Step
from trouterd.batching.simulator import simulate
from trouterd.batching.workload import MarkovWorkload

EVERY = 5
"""Seconds from one look of the controller to the next; reports come each second."""


class Plant:
    """A policy that goes by the controller's lists, and makes the workers' reports of what the simulator runs.

    Args:
        controller: of the network's models, in their order.
        requests: in flight all the time.
        jitter: share by which steps are told longer or shorter than they were.
    """

    barrier = False

    def __init__(self, controller: Controller, network: Network, requests: int, jitter: float = 0.02) -> None:
        self.controller, self.network, self.requests = controller, network, requests
        self._names, self._jitter = controller.group.models, jitter
        self._workload = _Counted(network, requests)
        self._policy = constant(self.thresholds)
        self._open: list[tuple[float, int] | None] = [None] * network.size
        self._steps: list[list[Step]] = [[] for _ in self._names]
        """Since the latest reports."""
        self._decisions = [0] * network.size
        self._reports = 0
        self._dice = np.random.default_rng(1)

    def serve(self, seconds: float) -> None:
        """Run for about so long."""
        steps = int(seconds * simulated(self.network, self.requests, (1,) * self.network.size))
        simulate(self.network, self, self._workload, steps)

    @property
    def thresholds(self) -> tuple[int, ...]:
        """In force."""
        lists = [self.controller.lists.get(name) or [1] for name in self._names]
        return clamp([values[min(self.requests, len(values)) - 1] for values in lists], self.requests)

    def launches(self, instant: Instant) -> Sequence[int]:
        """By the lists in force; ends of steps are seen first."""
        for model, opened in enumerate(self._open):
            if opened is not None and not instant.running[model]:
                begin, batch = opened
                seconds = (instant.now - begin) * float(self._dice.uniform(1 - self._jitter, 1))
                self._steps[model].append(Step(begin, seconds, batch))
                self._decisions[model] += batch
                self._open[model] = None
        if instant.now >= self._reports + 1:
            self._report(instant.now)
        found = self._policy.launches(instant)
        for model in found:
            self._open[model] = instant.now, instant.ready[model]
        return found

    def wake(self, instant: Instant) -> float:
        """As the lists in force have it."""
        return self._policy.wake(instant)

    def _report(self, now: float) -> None:
        self._reports += 1
        self.controller.observe({name: self._of(model, now) for model, name in enumerate(self._names)})
        self._steps = [[] for _ in self._names]
        if self._reports % EVERY == 0 and self.controller.recompute(now):
            self._policy = constant(self.thresholds)

    def _of(self, model: int, now: float) -> Report:
        moves = self._workload.moves[model]
        tokens = sum(count * self.network.commit[model][other] for other, count in moves.items())
        return Report(
            now=now,
            since=0.0,
            active=self.requests,
            version=0,
            tokens=int(tokens),
            decisions=self._decisions[model],
            moves={other: count for other, count in moves.items() if other != model},
            runs={},
            steps=self._steps[model],
        )


class _Counted(MarkovWorkload):
    """Moves are counted."""

    def __init__(self, network: Network, requests: int) -> None:
        super().__init__(network.routing, requests, 0)
        self.moves: list[Counter[int]] = [Counter() for _ in network.routing]

    def move(self, request: int, model: int) -> int:
        target = super().move(request, model)
        self.moves[model][target] += 1
        return target


def simulated(network: Network, requests: int, thresholds: Sequence[int]) -> float:
    """Requests' steps a second under thresholds that stay."""
    workload = MarkovWorkload(network.routing, requests, 0)
    return simulate(network, constant(thresholds), workload, 20_000).steps_per_second
