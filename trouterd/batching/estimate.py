"""What the throughput model needs to know, from what workers have counted: routing, step times, contention, lengths of runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from trouterd.batching.contention import alone, assumed, fit_contention
from trouterd.batching.groups import Group
from trouterd.batching.network import Floats, Matrix, Network, NetworkError, StepTime
from trouterd.batching.overlap import Overlaps, Sample
from trouterd.batching.report import Report

Key = TypeVar("Key")

_NOTHING = Report(now=0, since=0, active=0, version=0, tokens=0, decisions=0, moves={}, runs={}, steps=[])
"""What a worker has counted when it starts."""

HALF_LIFE = 2000
"""Steps of a model's requests after which what was counted before weighs half."""
RECENT = 20_000
"""Steps of all requests of a group after which a model's part in them weighs half."""
NEGLIGIBLE = 0.01
"""Part below which a model that too little is known of is left out, rather than that all models wait for it to be known."""
ENOUGH = 200
"""Requests' steps from which on a model's moves are known."""
ENOUGH_STEPS = 30
"""Steps from which on a model's step time is known."""
ENOUGH_HANDOFFS = 20
"""Launches that waited for hand-offs, and steps that sent some, from which on the time of a hand-off is known; 0 until then."""
SAMPLES = 2000
"""Steps that a fit looks at."""
_MISFIT = 0.15
"""Relative error above which a line is no picture of the step times."""
_SURE = 0.8
"""Part of steps in a factor of contention from which on a later one takes its place, were there even more in it."""

_LEAST_BASE = 1e-7
"""Seconds of any step, as fitted."""
_LEAST, _MOST = 1e-9, 1e12
"""Of what a file may say: no time is shorter, no count larger. Beyond them arithmetic comes to nothing."""
NotNegative = Annotated[float, Meta(ge=0, le=_MOST)]
Positive = Annotated[float, Meta(ge=_LEAST, le=_MOST)]
Signed = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
_Batch = Annotated[float, Meta(ge=_LEAST, le=1e6)]
_MOST_SECONDS = 1e3
"""Of a step or a hand-off."""
_StepSeconds = Annotated[float, Meta(ge=_LEAST_BASE, le=_MOST_SECONDS)]
_Run = Annotated[int, Meta(ge=0, le=1 << 31)]
_MOST_RUNS = 4096
"""Lengths of runs; what is counted is forgotten long before there are as many."""


class Learned(msgspec.Struct):
    """What is known of one model; the part that is kept between two runs of the daemon."""

    decisions: NotNegative = 0.0
    recent: NotNegative = 0.0
    """The same, but forgotten by the steps of the whole group."""
    tokens: NotNegative = 0.0
    moves: dict[str, NotNegative] = {}
    """By receiver."""
    runs: Annotated[dict[_Run, Positive], Meta(max_length=_MOST_RUNS)] = {}
    points: Annotated[list[tuple[_Batch, _StepSeconds]], Meta(max_length=SAMPLES)] = []
    """(batch, seconds) without contention."""
    contention: Annotated[float, Meta(ge=0, le=1e3)] | None = None
    told: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Part of that which steps have told, the rest being assumed; 0, as in files without it: the assumption replaces it."""
    waited: NotNegative = 0.0
    waited_seconds: NotNegative = 0.0
    handed: NotNegative = 0.0
    handed_seconds: Signed = 0.0
    """The last four as in `Report`."""

    def __post_init__(self) -> None:
        """Raises ValueError where no machine takes as long for a hand-off."""
        for name in ("waited", "handed"):
            if abs(getattr(self, f"{name}_seconds")) > _MOST_SECONDS * max(getattr(self, name), 1.0):
                raise ValueError(f"{name}_seconds: more than {_MOST_SECONDS:g} s each")


class Estimator:
    """Estimates of one group; weights decay with each model's own steps."""

    def __init__(self, group: Group, learned: Mapping[str, Learned] | None = None) -> None:
        self.group = group
        known = learned or {}
        self.learned = {name: known.get(name) or Learned() for name in group.models}
        self._samples: dict[str, deque[Sample]] = {name: deque(maxlen=SAMPLES) for name in group.models}
        self._sharing = [name for name, shares in zip(group.models, group.shares, strict=True) if shares]
        self._overlaps = Overlaps(self._sharing)
        self._last: dict[str, Report] = {}
        self._names = dict(zip(group.workers, group.models, strict=True))

    def observe(self, reports: Mapping[str, Report]) -> None:
        """Take in what has happened since the last reports; a model that is missing has nothing to say."""
        steps = {name: self._count(name, report) for name, report in reports.items()}
        weight = 0.5 ** (sum(steps.values()) / RECENT)
        for name, learned in self.learned.items():
            learned.recent = learned.recent * weight + steps.get(name, 0)
        for name, samples in self._overlaps.observe(reports).items():
            self._samples[name] += samples
        self._last.update(reports)

    def lacks(self) -> str:
        """What is not known well enough; '' if nothing."""
        used = self._used()
        if len(used) < 2:
            return "no request has been handed over yet"
        return next(filter(None, map(self._lacks_of, used)), "")

    def network(self) -> Network | None:
        """The deployment as it looks now; None while `lacks` says why."""
        if self.lacks():
            return None
        used = self._used()
        prior = self._assumed()
        for name in used:
            self._fit(name, prior[name])
        facts = [self.learned[name] for name in used]
        try:
            return Network(
                step_times=tuple(StepTime(tuple(learned.points)) for learned in facts),
                routing=tuple(self._row(learned, used, index) for index, learned in enumerate(facts)),
                commit=_commits(facts),
                contention=tuple(learned.contention or 0.0 for learned in facts),
                names=tuple(used),
                handoff=_handoff(facts),
            )
        except NetworkError:
            return None  # nobody stays and nothing is committed: too odd to plan for

    def _used(self) -> list[str]:
        reached = {
            target for learned in self.learned.values() for target, moves in learned.moves.items() if moves > 0.5
        }
        used = [name for name in self.group.models if self.learned[name].decisions > 0 or name in reached]
        steps = sum(learned.recent for learned in self.learned.values())
        matter = [name for name in used if not self._lacks_of(name) or self.learned[name].recent >= NEGLIGIBLE * steps]
        return matter if len(matter) > 1 else used

    def _lacks_of(self, name: str) -> str:
        learned = self.learned[name]
        if learned.decisions < ENOUGH:
            return f"{name} has given {learned.decisions:.0f} of {ENOUGH} tokens"
        if not learned.points and len(self._samples[name]) < ENOUGH_STEPS:
            return f"{name} has taken {len(self._samples[name])} of {ENOUGH_STEPS} steps"
        return ""

    def _count(self, name: str, report: Report) -> int:
        """Take in a model's counts; returns its new steps."""
        before, learned = self._last.get(name), self.learned[name]
        if before is None:
            return 0  # the first word of this worker: counts from before are not ours, or are known
        if report.since != before.since:
            before = _NOTHING
        steps = report.decisions - before.decisions
        weight = 0.5 ** (steps / HALF_LIFE)
        learned.decisions = learned.decisions * weight + steps
        learned.tokens = learned.tokens * weight + report.tokens - before.tokens
        moves = {self._names[w]: n - before.moves.get(w, 0) for w, n in report.moves.items() if w in self._names}
        learned.moves = _decayed(learned.moves, moves, weight)
        runs = {run: n - before.runs.get(run, 0) for run, n in report.runs.items()}
        learned.runs = _decayed(learned.runs, runs, weight)
        for field in ("waited", "waited_seconds", "handed", "handed_seconds"):
            news = getattr(report, field) - getattr(before, field)
            setattr(learned, field, getattr(learned, field) * weight + news)
        return steps

    def _row(self, learned: Learned, used: Sequence[str], index: int) -> tuple[float, ...]:
        row = [learned.moves.get(name, 0.0) for name in used]
        row[index] = max(learned.decisions - sum(row) + row[index], 0.0)
        return tuple((np.array(row) / sum(row)).tolist())

    def _assumed(self) -> dict[str, float]:
        """Contention as long as nothing is known of it."""
        seconds = [self._mean_seconds(name) for name in self._sharing]
        factors = assumed(len(seconds), int(np.argmax(seconds))) if seconds else ()
        return dict.fromkeys(self.group.models, 0.0) | dict(zip(self._sharing, factors, strict=True))

    def _mean_seconds(self, name: str) -> float:
        """Of its steps; 0 if there is none."""
        seconds = [own for _, own, _ in self._samples[name]] or [own for _, own in self.learned[name].points]
        return float(np.mean(seconds)) if seconds else 0.0

    def _fit(self, name: str, prior: float) -> None:
        """Step time by batch size, and contention, from the samples; what was known before stays while they are few."""
        samples = self._samples[name]
        learned = self.learned[name]
        factor = learned.contention
        if factor is None or not learned.told:
            factor = learned.contention = prior
        if len(samples) < ENOUGH_STEPS:
            return
        batch, seconds, overlap = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
        if name in self._sharing:
            found = fit_contention(batch, seconds, overlap, prior)
            # Models that wait for each other hardly overlap: what was told before they did is better known.
            if found.told >= min(learned.told, _SURE):
                factor, learned.told = found.factor, found.told
        learned.contention = factor
        times = alone(seconds, overlap, factor)
        base, slope = _line(batch, times)
        misfit = float(np.mean(np.abs(base + slope * batch - times)) / np.mean(times))
        sizes = np.unique(batch)
        if misfit > _MISFIT and len(sizes) > 2:
            medians = np.maximum.accumulate([float(np.median(times[batch == size])) for size in sizes])
            learned.points = list(zip(sizes.tolist(), medians.tolist(), strict=True))
        else:
            learned.points = [(1.0, base + slope), (2.0, base + 2 * slope)]


def _handoff(facts: Sequence[Learned]) -> float:
    """Seconds from the end of a step to the launch at a receiver that waits, less what the sender's step took after the sending."""
    waited, handed = sum(learned.waited for learned in facts), sum(learned.handed for learned in facts)
    if min(waited, handed) < ENOUGH_HANDOFFS:
        return 0.0
    arriving = sum(learned.waited_seconds for learned in facts) / waited
    leaving = sum(learned.handed_seconds for learned in facts) / handed
    return max(arriving - leaving, 0.0)


def _decayed(before: Mapping[Key, float], news: Mapping[Key, int], weight: float) -> dict[Key, float]:
    keys = before.keys() | news.keys()
    merged = {key: before.get(key, 0.0) * weight + news.get(key, 0) for key in keys}
    return {key: value for key, value in merged.items() if value > 1e-3}


def _line(batch: Floats, seconds: Floats) -> tuple[float, float]:
    """Robust base and slope, both at least 0: medians per size, weighted by how often each was seen."""
    sizes, counts = np.unique(batch, return_counts=True)
    medians = np.array([np.median(seconds[batch == size]) for size in sizes])
    slope = 0.0
    if len(sizes) > 1:
        mean = float(np.average(sizes, weights=counts))
        spread = float(np.average((sizes - mean) ** 2, weights=counts))
        slope = float(
            np.average((sizes - mean) * (medians - np.average(medians, weights=counts)), weights=counts) / spread
        )
        slope = min(max(slope, 0.0), float(np.average(medians, weights=counts)) / mean)
    base = float(np.average(medians - slope * sizes, weights=counts))
    return max(base, _LEAST_BASE), slope


def _commits(facts: Sequence[Learned]) -> Matrix:
    """Tokens that a move commits: one for staying; for leaving, what is left of the tokens that were counted."""
    rows = []
    for index, learned in enumerate(facts):
        leaves = sum(learned.moves.values())
        stays = max(learned.decisions - leaves, 0.0)
        kept = max(0.0, (learned.tokens - stays) / leaves) if leaves else 0.0
        rows.append(tuple(1.0 if other == index else kept for other in range(len(facts))))
    return tuple(rows)
