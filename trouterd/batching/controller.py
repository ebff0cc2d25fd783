"""Chooses thresholds while the daemon runs: estimates, plans, puts a plan into force, looks at what came of it.

Pure: time and reports come from outside, nothing waits. The constants are choices, not results of tuning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from trouterd.batching.bound import ideal
from trouterd.batching.estimate import Estimator, Learned
from trouterd.batching.groups import Group
from trouterd.batching.launch import clamp, feasible
from trouterd.batching.network import Network
from trouterd.batching.plan import plan
from trouterd.batching.predictor import Predictor
from trouterd.batching.replay import best, geometric, rates
from trouterd.batching.report import Report

GAIN = 0.02
"""What a plan must promise at the present number of requests before it replaces the one in force."""
WAITING = 0.1
"""The same where nothing waits so far. Eager launches hide behind a running step what lies between two steps of a model that waits;
the throughput model leaves it out, and has promised so much too much (docs/batching.md)."""
LOSS = 0.05
"""Fall of the measured throughput for which a change is taken back."""
HOLD = 10.0
"""Seconds for which a change is left alone and watched."""
SETTLE = 2.0
"""Of those that do not count: the first ones."""
FREEZE = 60.0
"""Seconds without a change after one that was taken back; doubles each time."""
LONGEST_FREEZE = 3600.0
REPLAY = 60.0
"""Seconds between two replays of runs that are not geometric."""
LIKE = 0.2
"""Numbers of requests that differ by no more than this share are compared."""
FEWEST, MOST = 16, 256
"""Requests that lists go up to, at least and at most."""
LINGER_STEPS = 2.0
MOST_LINGER = 1.0
"""Seconds."""

Lists = dict[str, list[int]]


class Kept(msgspec.Struct):
    """What one group keeps between two runs of the daemon."""

    learned: dict[str, Learned] = {}
    lists: Lists = {}


@dataclass(frozen=True)
class _Sample:
    """Between two reports."""

    now: float
    seconds: float
    tokens: int
    active: float


@dataclass(frozen=True)
class _Trial:
    """A change that is being watched."""

    since: float
    before: Lists
    rate: float
    """Tokens/s before it; 0: unknown."""
    active: float


class Controller:
    """Of one group."""

    def __init__(self, group: Group, kept: Kept | None = None) -> None:
        self.group = group
        self.estimator = Estimator(group, kept.learned if kept else None)
        self.lists: Lists = dict(kept.lists) if kept else {}
        """In force; a model that is missing launches whatever is ready."""
        self.lingers: dict[str, float] = {}
        self.state = "learning"
        """In words."""
        self.predicted = 0.0
        self.ideal = 0.0
        """Tokens/s at the present number of requests; 0 while unknown."""
        self.network: Network | None = None
        self._samples: deque[_Sample] = deque(maxlen=64)
        self._last: tuple[float, dict[str, int]] | None = None
        self._trial: _Trial | None = None
        self._frozen_until = 0.0
        self._freeze = FREEZE
        self._replayed = float("-inf")
        self._chosen: Lists = {}
        """Of the latest replay."""
        self._rates: dict[tuple[int, tuple[int, ...]], float] = {}
        """Simulated since then."""
        self._most = FEWEST

    # Between steps of the event loop

    def observe(self, reports: Mapping[str, Report]) -> None:
        """Take in reports; models that did not answer are missing."""
        own = {name: reports[name] for name in self.group.models if name in reports}
        if not own:
            return
        self.estimator.observe(own)
        now = max(report.now for report in own.values())
        active = max(report.active for report in own.values())
        tokens = {name: report.tokens for name, report in own.items()}
        if self._last is not None and self._last[1].keys() == tokens.keys():
            made = sum(tokens.values()) - sum(self._last[1].values())
            if made >= 0 and now > self._last[0]:
                self._samples.append(_Sample(now, now - self._last[0], made, active))
        self._last = now, tokens
        self._most = min(max(self._most, 2 * active), MOST)

    def measured(self, now: float, seconds: float = HOLD) -> tuple[float, float]:
        """Tokens/s and mean active requests over the last `seconds`; zeros when nothing was measured."""
        recent = [s for s in self._samples if s.now > now - seconds and s.active > 0]
        span = sum(s.seconds for s in recent)
        if not span:
            return 0.0, 0.0
        return sum(s.tokens for s in recent) / span, sum(s.active * s.seconds for s in recent) / span

    def keep(self) -> Kept:
        """What is worth keeping."""
        return Kept(self.estimator.learned, self.lists)

    # In a thread

    def recompute(self, now: float) -> bool:
        """Look at everything again; True when the lists or lingers have changed. Up to a second of one core."""
        before = self.lists, self.lingers
        self.network = network = self.estimator.network()
        if network is None:
            self.lists, self._trial = {}, None
            self.predicted = self.ideal = 0.0
            self.state = f"learning: {self.estimator.lacks() or 'the counts make no sense yet'}"
        else:
            self._choose(network, now)
        return before != (self.lists, self.lingers)

    def _choose(self, network: Network, now: float) -> None:
        rate, active = self.measured(now)
        count = max(round(active), 2)
        if not self._undecided(now, rate, active):
            self._improve(network, now, count, rate, active)
        thresholds = self._thresholds(self.lists, network, count)
        self.predicted = self._rate(network, count, thresholds) if active else 0.0
        self.ideal = ideal(network, count) * network.tokens_per_step if active else 0.0
        slowest = max(time.of(threshold) for time, threshold in zip(network.step_times, thresholds, strict=True))
        linger = min(LINGER_STEPS * slowest, MOST_LINGER)
        known = max(self.lingers.values(), default=0.0)
        if abs(linger - known) > 0.1 * known:
            self.lingers = dict.fromkeys(self.group.models, linger)

    def _undecided(self, now: float, rate: float, active: float) -> bool:
        """Whether nothing may change now: a trial goes on, or one has just been taken back."""
        trial = self._trial
        if trial is not None:
            if now - trial.since < HOLD:
                self.state = "watching the latest change"
                return True
            self._trial = None
            rate, active = self.measured(now, now - trial.since - SETTLE)
            alike = abs(active - trial.active) <= LIKE * trial.active
            if alike and rate < (1 - LOSS) * trial.rate:
                self.lists = trial.before
                self._chosen, self._replayed = {}, now
                self._frozen_until = now + self._freeze
                self._freeze = min(2 * self._freeze, LONGEST_FREEZE)
            elif alike and trial.rate:
                self._freeze = FREEZE
        if now < self._frozen_until:
            self.state = f"taken back: {self._frozen_until - now:.0f} s until the next change"
            return True
        return False

    def _improve(self, network: Network, now: float, count: int, rate: float, active: float) -> None:
        target = self._target(network, now, count)
        old = self._thresholds(self.lists, network, count)
        new = self._thresholds(target, network, count)
        self.state = "settled"
        gain = WAITING if max(old) == 1 else GAIN
        if old != new and self._rate(network, count, new) > (1 + gain) * self._rate(network, count, old):
            self._trial = _Trial(now, self.lists, rate, active)
            self.lists = target
            self.state = "watching the latest change"

    def _target(self, network: Network, now: float, count: int) -> Lists:
        found = plan(network, max(self._most, count), self.group.max_batch)
        planned = {name: list(values) for name, values in zip(network.names, found.lists, strict=True)}
        if self._plain(network):
            self._chosen = {}
            return planned
        if now - self._replayed >= REPLAY:
            self._replayed = now
            self._rates.clear()
            held = self._thresholds(self.lists, network, count)
            winner = best(network, self._runs(network), count, held, found.thresholds(count))
            self._chosen = _proportional(network.names, winner, count, max(self._most, count), self.group.max_batch)
        return self._chosen or self.lists

    def _plain(self, network: Network) -> bool:
        return all(geometric(runs) for runs in self._runs(network))

    def _runs(self, network: Network) -> list[dict[int, float]]:
        return [self.estimator.learned[name].runs or {1: 1.0} for name in network.names]

    def _rate(self, network: Network, count: int, thresholds: Sequence[int]) -> float:
        """Predicted tokens/s; 0 for thresholds that cannot work."""
        if not feasible(thresholds, count):
            return 0.0
        if not self._plain(network):
            key = count, tuple(thresholds)
            if key not in self._rates:
                found = rates(network, self._runs(network), count, thresholds)
                self._rates[key] = sum(found) / len(found)
            return self._rates[key]
        return Predictor(network, count).steps_per_second(count, thresholds) * network.tokens_per_step

    def _thresholds(self, lists: Lists, network: Network, count: int) -> tuple[int, ...]:
        chosen = [lists.get(name) or [1] for name in network.names]
        return tuple(min(values[min(count, len(values)) - 1], count) for values in chosen)


def _proportional(names: Sequence[str], thresholds: Sequence[int], count: int, most: int, max_batch: int) -> Lists:
    """Lists that have these thresholds at `count` requests, and the same parts of others."""
    rows = []
    for active in range(1, most + 1):
        part = (active - 1) / max(count - 1, 1)
        rows.append(clamp([round(1 + (threshold - 1) * part) for threshold in thresholds], active, max_batch))
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
