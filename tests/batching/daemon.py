"""Reports that workers would make, from a deployment whose true parameters are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from trouterd.batching.controller import Controller
from trouterd.batching.groups import Group
from trouterd.batching.network import Network
from trouterd.batching.report import Report, Step

NAMES = ("small", "large")


def group(*, shares: bool = False) -> Group:
    return Group(NAMES, (0, 1), (shares, shares), 256)


@dataclass
class Daemon:
    """Makes the reports that workers would make, from a network's true parameters."""

    network: Network
    active: int
    rate: float = 1000.0
    """Requests' steps a second, all models together."""
    seed: int = 0
    now: float = 100.0
    decisions: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    moves: list[Counter[int]] = field(default_factory=lambda: [Counter(), Counter()])
    runs: list[Counter[int]] = field(default_factory=lambda: [Counter(), Counter()])
    overlap: bool = False
    version: int = 0
    since: list[float] = field(default_factory=lambda: [1.0, 2.0])
    prompts: tuple[float, float] = (0.0, 0.0)
    """Shares of the models' time that go into prompts; no step of others is made while the one with the most is busy with them."""
    prompt_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)

    def reports(self, seconds: float = 1.0) -> dict[str, Report]:
        """One second later."""
        self.now += seconds
        found = {}
        for model, name in enumerate(NAMES):
            count = int(self.rate * (1 - max(self.prompts)) * seconds * self.network.shares[model])
            self.prompt_seconds[model] += self.prompts[model] * seconds
            leaving = self.dice.binomial(count, self.network.routing[model][1 - model])
            self.decisions[model] += count
            self.moves[model][1 - model] += int(leaving)
            kept = self.network.commit[model][1 - model]
            self.tokens[model] += count - leaving + int(kept * leaving)
            share = max(leaving / max(count, 1), 1e-9)
            self.runs[model].update(self.dice.geometric(share, leaving).tolist())
            found[name] = Report(
                now=self.now,
                since=self.since[model],
                active=self.active,
                version=self.version,
                tokens=self.tokens[model],
                decisions=self.decisions[model],
                moves=dict(self.moves[model]),
                runs=dict(self.runs[model]),
                steps=self._steps(model),
                prompt_seconds=self.prompt_seconds[model],
            )
        return found

    def restart(self, model: int) -> None:
        """Its worker dies and comes back."""
        self.since[model] = self.now
        self.decisions[model] = self.tokens[model] = 0
        self.prompt_seconds[model] = 0.0
        self.moves[model].clear()
        self.runs[model].clear()

    def _steps(self, model: int) -> list[Step]:
        """Of one second. With `overlap`: 0.2 s together, 0.1 s small alone, 0.1 s large alone, and so on."""
        phases = [(0.2, (0, 1)), (0.1, (0,)), (0.1, (1,))] if self.overlap else [(0.4, (0, 1))]
        steps, start = [], self.now - 1.0
        for length, who in phases * 2:
            begin = start
            while model in who:
                batch = int(self.dice.integers(1, 9))
                factor = self.network.contention[model] * (len(who) - 1)
                seconds = self.network.step_times[model].of(batch) * (1 + factor) * float(self.dice.uniform(0.98, 1.02))
                if begin + seconds > start + length:
                    break
                steps.append(Step(begin, seconds, batch))
                begin += seconds
            start += length
        return steps


def run(controller: Controller, daemon: Daemon, seconds: int) -> None:
    for second in range(seconds):
        controller.observe(daemon.reports())
        if second % 5 == 4:
            controller.recompute(daemon.now)
