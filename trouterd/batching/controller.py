"""Chooses thresholds while the daemon runs: estimates, plans, puts a plan into force, looks at what came of it.

Pure: time and reports come from outside, nothing waits. The constants are choices, not results of tuning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from trouterd.batching.bound import ideal
from trouterd.batching.estimate import Estimator, Learned, NotNegative
from trouterd.batching.groups import Group
from trouterd.batching.launch import clamp, feasible
from trouterd.batching.network import Network
from trouterd.batching.plan import plan
from trouterd.batching.predictor import Predictor
from trouterd.batching.replay import best, geometric, rates
from trouterd.batching.report import Report
from trouterd.batching.trials import FREEZE, HOLD, Lists, Load, Trials

GAIN = 0.02
"""What a plan must promise at the present number of requests before it replaces the one in force."""
WAITING = 0.03
"""The same where nothing waits so far."""
REPLAY = 60.0
"""Seconds between two replays of runs that are not geometric."""
FEWEST, MOST = 16, 256
"""Requests that lists go up to, at least and at most."""
LINGER_STEPS = 4.0
"""Of the slowest model: a request that has just missed a launch waits for that step, and until the others are back."""
MOST_LINGER = 1.0
"""Seconds."""
_SAMPLES = 64
"""Times between two reports that throughput is taken from; a second each, and so as long as a change is watched at most."""


class Kept(msgspec.Struct):
    """What one group keeps between two runs of the daemon."""

    learned: dict[str, Learned] = {}
    lists: dict[str, list[Annotated[int, Meta(ge=1)]]] = {}
    """Of trials nothing is kept: a start begins with what has proved itself."""
    trust: float = 1.0
    turns: bool = False
    """Models ran one at a time; a freeze under that says nothing of models side by side."""
    frozen: NotNegative = 0.0
    """Seconds that were left of a freeze."""
    freeze: NotNegative = FREEZE
    """Seconds of the next one."""


@dataclass(frozen=True)
class _Sample:
    """Between two reports."""

    now: float
    seconds: float
    tokens: int
    active: float
    prompts: float
    """Seconds that the model with the most of them spent in steps with prompts."""


class Controller:
    """Of one group.

    Args:
        group: its models.
        kept: by a predecessor.
        now: seconds; what was left of a freeze begins then.
    """

    def __init__(self, group: Group, kept: Kept | None = None, now: float = 0.0) -> None:
        kept = kept or Kept()
        self.group = group
        self.estimator = Estimator(group, kept.learned)
        self.lists: Lists = _usable(kept.lists, group)
        """In force; a model that is missing launches whatever is ready."""
        self._turns = kept.turns
        self.lingers: dict[str, float] = {}
        self.state = "learning"
        """In words."""
        self.predicted = 0.0
        self.ideal = 0.0
        """Tokens/s at the present number of requests; 0 while unknown."""
        self.network: Network | None = None
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._last: dict[str, Report] = {}
        """The latest reports."""
        self._trials = Trials(kept.trust, now, kept.frozen, kept.freeze)
        self._replayed = float("-inf")
        self._chosen: Lists = {}
        """Of the latest replay."""
        self._rates: dict[tuple[int, tuple[int, ...]], float] = {}
        """Simulated since then."""
        self._most = FEWEST
        self._told = self.lists, self.lingers
        """As of the latest `recompute`."""

    @property
    def trust(self) -> float:
        """What waiting has reached over what the throughput model promised of it."""
        return self._trials.trust

    @property
    def turns(self) -> bool:
        """Models run one at a time. What was measured before a change of this says nothing about what comes after it."""
        return self._turns

    @turns.setter
    def turns(self, turns: bool) -> None:
        if turns == self._turns:
            return
        self._turns = turns
        self._forget()
        # A new one: the event loop may be looking at the old one.
        self._samples = deque(maxlen=_SAMPLES)
        self._trials = Trials(self.trust)
        self._chosen, self._rates, self._replayed = {}, {}, float("-inf")

    # Between steps of the event loop

    def observe(self, reports: Mapping[str, Report]) -> None:
        """Take in reports; models that did not answer are missing."""
        own = {name: reports[name] for name in self.group.models if name in reports}
        if not own:
            return
        self.estimator.observe(own)
        # While a model is away the others' tokens are those of another load.
        sample = _sample(self._last, own) if len(own) == len(self.group.models) else None
        if sample is not None:
            self._samples.append(sample)
        self._last = own
        self._most = min(max(self._most, *(2 * report.active for report in own.values())), MOST)

    def measured(self, now: float, seconds: float = HOLD) -> Load:
        """Over the last `seconds`, as far as there were requests."""
        recent = [s for s in self._samples if s.now > now - seconds and s.active > 0]
        span = sum(s.seconds for s in recent)
        if not span:
            return Load()
        return Load(
            rate=sum(s.tokens for s in recent) / span,
            active=sum(s.active * s.seconds for s in recent) / span,
            prompts=sum(s.prompts for s in recent) / span,
        )

    def keep(self, now: float) -> Kept:
        """What is worth keeping."""
        trials = self._trials
        return Kept(self.estimator.learned, self._untried, self.trust, self.turns, trials.frozen(now), trials.freeze)

    @property
    def settled(self) -> tuple[Lists, float]:
        """What the latest verdicts have changed of what is worth keeping."""
        return self._untried, self._trials.freeze

    @property
    def _untried(self) -> Lists:
        """In force apart from a trial."""
        before = self._trials.untried
        return self.lists if before is None else before

    def _forget(self) -> None:
        """What is being watched is not judged; of a trial nothing stays."""
        self.lists = self._untried
        self._trials.forget()

    # In a thread

    def recompute(self, now: float, *, obeyed: bool = True) -> bool:
        """Look at everything again; True when the lists or lingers have changed. Up to a second of one core.

        Args:
            now: seconds.
            obeyed: workers go by the lists, so that what is measured says something about them.
        """
        if not obeyed:
            self._forget()
        network = self.estimator.network()
        if network is not None and self.turns and network.size == 2:
            network = replace(network, turns=True)
        self.network = network
        if network is None:
            self.lists = {}
            self._trials.forget()
            self.predicted = self.ideal = 0.0
            self.state = f"learning: {self.estimator.lacks() or 'the counts make no sense yet'}"
        else:
            self._choose(network, now, obeyed=obeyed)
        before, self._told = self._told, (self.lists, self.lingers)
        return before != self._told

    def _choose(self, network: Network, now: float, *, obeyed: bool) -> None:
        before = self._trials.judge(now, self.measured)
        if before is not None:
            self.lists = before
            self._chosen, self._replayed = {}, now
        active = self.measured(now).active
        count = max(round(active), 2)
        held = self._thresholds(self.lists, network, count)
        if self._plain(network) and not self._predictor(network, count).judges(held):
            # Another model is the slowest one now, one that has just come into use, say: nothing is known of what these gain.
            self.lists = {}
            self._trials.forget()
        # Others read the state meanwhile: it is the old one until there is a new one.
        if pending := self._trials.pending(now):
            self.state = pending
        elif not active and self._samples:
            # A model is away, or there are no requests: nobody could tell what a change does, nor for how many it is made.
            self.state = "nothing to measure"
        else:
            self._improve(network, now, count, obeyed=obeyed)
        thresholds = self._thresholds(self.lists, network, count)
        self.predicted = self._rate(network, count, thresholds) if active else 0.0
        self.ideal = ideal(network, count) * network.tokens_per_step if active else 0.0
        slowest = max(time.of(threshold) for time, threshold in zip(network.step_times, thresholds, strict=True))
        linger = min(LINGER_STEPS * slowest, MOST_LINGER)
        known = max(self.lingers.values(), default=0.0)
        if abs(linger - known) > 0.1 * known:
            self.lingers = dict.fromkeys(self.group.models, linger)

    def _improve(self, network: Network, now: float, count: int, *, obeyed: bool) -> None:
        planned = self._target(network, now, count)

        def believed(lists: Lists) -> float:
            """Tokens/s as predicted; of waiting, less what it has fallen short of its promises so far."""
            thresholds = self._thresholds(lists, network, count)
            return self._rate(network, count, thresholds) * (self.trust if max(thresholds) > 1 else 1.0)

        waits = max(self._thresholds(self.lists, network, count)) > 1
        target = max(planned, Lists(), key=believed)
        if believed(target) > (1 + (GAIN if waits else WAITING)) * believed(self.lists):
            self._change(network, now, count, target, obeyed=obeyed, trial=False)
        elif obeyed and self._due(network, now, count):
            self._change(network, now, count, Lists() if waits else planned, obeyed=obeyed, trial=True)
        self.state = self._trials.pending(now) or "settled"

    def _due(self, network: Network, now: float, count: int) -> bool:
        """Whether to try the other choice now, which is for nothing where the load before it cannot be compared."""
        due = self._trials.due(now, early=not self._predictor(network, count).reliable)
        return due and self.measured(now).telling

    def _change(self, network: Network, now: float, count: int, lists: Lists, *, obeyed: bool, trial: bool) -> None:
        """Put lists into force, and watch what comes of it."""
        old, new = (self._thresholds(found, network, count) for found in (self.lists, lists))
        if old == new:
            return
        before, self.lists = self.lists, lists
        if not obeyed:
            return
        waits = max(new) > 1
        wait, eager = (new, old) if waits else (old, new)
        without = self._rate(network, count, eager) if max(eager) == 1 else 0.0
        promise = self._rate(network, count, wait) / without if without else 0.0
        self._trials.watch(now, before, self.measured(now), promise, waits=waits, trial=trial)

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
        # Replays know models side by side only.
        return network.turns or all(geometric(runs) for runs in self._runs(network))

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
        return self._predictor(network, count).steps_per_second(count, thresholds) * network.tokens_per_step

    def _predictor(self, network: Network, count: int) -> Predictor:
        """As `plan` has it: which model is the slowest one is asked of the most requests, not of the present ones."""
        return Predictor(network, max(self._most, count))

    def _thresholds(self, lists: Lists, network: Network, count: int) -> tuple[int, ...]:
        chosen = [lists.get(name) or [1] for name in network.names]
        return tuple(min(values[min(count, len(values)) - 1], count) for values in chosen)


def _sample(last: Mapping[str, Report], own: Mapping[str, Report]) -> _Sample | None:
    """Of what the same worker processes did between two reports; None where others did it."""
    if {name: report.since for name, report in last.items()} != {name: report.since for name, report in own.items()}:
        return None
    now, then = (max(report.now for report in reports.values()) for reports in (own, last))
    if now <= then:
        return None
    return _Sample(
        now=now,
        seconds=now - then,
        tokens=sum(report.tokens - last[name].tokens for name, report in own.items()),
        active=max(report.active for report in own.values()),
        prompts=max(report.prompt_seconds - last[name].prompt_seconds for name, report in own.items()),
    )


def _usable(kept: Lists, group: Group) -> Lists:
    """What is left of lists from a file: those of the group, cut to what can become ready and never deadlocks."""
    own = {name: values[:MOST] for name, values in kept.items() if name in group.models and values}
    counts = range(1, max(map(len, own.values()), default=0) + 1)
    rows = [
        clamp([values[min(count, len(values)) - 1] for values in own.values()], count, group.max_batch)
        for count in counts
    ]
    return {name: list(column) for name, column in zip(own, zip(*rows, strict=True), strict=False)}


def _proportional(names: Sequence[str], thresholds: Sequence[int], count: int, most: int, max_batch: int) -> Lists:
    """Lists that have these thresholds at `count` requests, and the same parts of others."""
    rows = []
    for active in range(1, most + 1):
        part = (active - 1) / max(count - 1, 1)
        rows.append(clamp([round(1 + (threshold - 1) * part) for threshold in thresholds], active, max_batch))
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
