"""Discrete-event simulation of a deployment, the independent check of the throughput model.

Same assumptions (closed system, batches launched whole, contention as in `Network`), none of its approximations: every request is
followed step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trouterd.batching.network import Floats, Network
from trouterd.batching.policies import Instant, Policy
from trouterd.batching.workload import Workload

_TIE = 1e-9
"""Share of a step below which what is left of it is rounding."""


class StalledError(RuntimeError):
    """The policy launches nothing although nothing runs and requests are left."""


@dataclass(frozen=True)
class Outcome:
    """What a simulation measured, from its start to the last step that ended."""

    seconds: float
    steps: tuple[int, ...]
    """Per model, requests' steps: a batch of b counts b."""
    batches: tuple[int, ...]
    """Per model."""
    busy: tuple[float, ...]
    """Seconds that each model ran."""
    tokens: float
    """Committed, by the commit matrix; the last step of a request that ends commits like one that stays."""
    ends: tuple[float, ...]
    """When each request ended, infinity if it did not."""
    gaps: Floats
    """Seconds between two commits of one request, over all requests."""
    longest_hold: float
    """Most seconds for which an idle model let a ready request wait."""

    @property
    def steps_per_second(self) -> float:
        """All models together."""
        return sum(self.steps) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Committed output tokens."""
        return self.tokens / self.seconds

    @property
    def mean_latency(self) -> float:
        """Seconds from the start to the end of a request; infinity if one did not end."""
        return sum(self.ends) / len(self.ends)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each model in all steps, as they came out."""
        return tuple(steps / sum(self.steps) for steps in self.steps)


def simulate(network: Network, policy: Policy, workload: Workload, steps: int) -> Outcome:
    """Run until `steps` requests' steps have ended or all requests have.

    Raises:
        StalledError: the policy is at a dead end.
    """
    run = _Run(network, policy, workload)
    while run.left and sum(run.steps) < steps:
        run.launch()
        run.advance()
    return run.outcome()


class _Run:
    """State of one simulation."""

    def __init__(self, network: Network, policy: Policy, workload: Workload) -> None:
        self._network, self._policy, self._workload = network, policy, workload
        count = network.size
        self._now = 0.0
        self._ready: list[list[int]] = [[] for _ in range(count)]
        self._since: list[float] = [0.0] * workload.requests
        """When the request's last step ended."""
        self._arrived: list[float] = [0.0] * workload.requests
        """When it was ready for its next one."""
        self._idle_since = [0.0] * count
        self._running: list[list[int]] = [[] for _ in range(count)]
        self._ended: list[tuple[int, list[int]]] = []
        self._moving: deque[tuple[float, int, int]] = deque()
        """When, where and which request will be ready after a hand-off; in this order."""
        self._work = [0.0] * count
        self._tie = [0.0] * count
        self._wake = float("inf")
        self.left = workload.requests
        self.steps = [0] * count
        self._batches, self._busy = [0] * count, [0.0] * count
        self._tokens = 0.0
        self._committed = [0.0] * workload.requests
        self._gaps: list[float] = []
        self._ends = [float("inf")] * workload.requests
        self._longest_hold = 0.0
        self._times = [
            step_time.seconds(np.arange(workload.requests + 1, dtype=np.float64)).tolist()
            for step_time in network.step_times
        ]
        for request in range(workload.requests):
            self._ready[workload.start(request)].append(request)

    def launch(self) -> None:
        """Ask the policy, and when it wants to be asked again."""
        instant = self._instant()
        for model in self._policy.launches(instant):
            self._start(model)
        if not any(self._running):
            self._wake = self._policy.wake(instant)
            if self._wake == float("inf") and not self._moving:
                raise StalledError(f"at {self._now:g} s: {instant.ready} requests are ready and nothing is launched")
        else:
            self._wake = self._policy.wake(self._instant())

    def _instant(self) -> Instant:
        return Instant(
            now=self._now,
            ready=tuple(map(len, self._ready)),
            oldest=tuple(self._since[ready[0]] if ready else float("inf") for ready in self._ready),
            running=tuple(map(bool, self._running)),
            active=self.left,
            moving=bool(self._moving),
        )

    def _start(self, model: int) -> None:
        batch = self._ready[model]
        self._running[model], self._ready[model] = batch, []
        self._work[model] = self._times[model][len(batch)]
        self._tie[model] = self._work[model] * _TIE
        self._batches[model] += 1
        held = self._now - max(self._idle_since[model], self._arrived[batch[0]])
        self._longest_hold = max(self._longest_hold, held)

    def advance(self) -> None:
        """To the next end of a step or hand-off, or to when the policy wants to be asked."""
        others = sum(map(bool, self._running)) - 1
        slow = [1 + factor * others for factor in self._network.contention]
        running = [model for model, batch in enumerate(self._running) if batch]
        seconds = min((self._work[model] * slow[model] for model in running), default=float("inf"))
        before = self._now
        arrival = self._moving[0][0] if self._moving else float("inf")
        other = min(self._wake, arrival)
        # A step ends by its own length, even where the clock is too far on to tell it apart.
        if before + seconds <= other:
            self._now = before + seconds
        else:
            self._now = max(before, other)
            seconds = self._now - before
        for model in running:
            self._busy[model] += seconds
            self._work[model] -= seconds / slow[model]
        for model in running:
            if self._work[model] <= self._tie[model]:
                self._ended.append((model, self._running[model]))
                self._running[model] = []
                self._idle_since[model] = self._now
        if not (self._policy.barrier and any(self._running)):
            for model, batch in self._ended:
                self._finish(model, batch)
            self._ended = []
        while self._moving and self._moving[0][0] <= self._now:
            _, target, request = self._moving.popleft()
            self._arrive(request, target)

    def _arrive(self, request: int, model: int) -> None:
        self._arrived[request] = self._now
        self._ready[model].append(request)

    def _finish(self, model: int, batch: Sequence[int]) -> None:
        self.steps[model] += len(batch)
        for request in batch:
            target = self._workload.move(request, model)
            tokens = self._network.commit[model][model if target is None else target]
            if tokens > 0:
                self._tokens += tokens
                self._gaps.append(self._now - self._committed[request])
                self._committed[request] = self._now
            if target is None:
                self._ends[request] = self._now
                self.left -= 1
            else:
                self._since[request] = self._now
                if target == model or not self._network.handoff:
                    self._arrive(request, target)
                else:
                    self._moving.append((self._now + self._network.handoff, target, request))

    def outcome(self) -> Outcome:
        """So far."""
        return Outcome(
            seconds=self._now,
            steps=tuple(self.steps),
            batches=tuple(self._batches),
            busy=tuple(self._busy),
            tokens=self._tokens,
            ends=tuple(self._ends),
            gaps=np.array(self._gaps),
            longest_hold=self._longest_hold,
        )
