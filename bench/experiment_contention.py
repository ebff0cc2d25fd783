"""How much longer a step of each model takes per time for which the other one ran beside it: fitted to the windows of a run.

A step takes what it takes alone, something for each of its requests that hand-offs cost (the host's work, and the further rows
that a visit feeds), and a part of the time that it was overlapped for:

    step = alone(batch) + more * batch + slope * overlap

`more` is one number for each model, the slope one for each model and each way of sharing the card; both by least squares over
windows. A slope of 0 is a card of one's own, of 1 a model that stands still while the other one runs. The throughput model's
contention factor, by which a step takes longer while the other one runs all the time, is slope / (1 - slope).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trouterd.batching.network import Floats, StepTime

_LEAST_OVERLAP = 0.02
"""Of a step, from which on a window tells anything of what it costs."""
_LITTLE_OVERLAP = 0.2
"""Up to which it tells what hand-offs cost."""
_MOST = 0.95
"""Slope from which on a factor is that of this one: a model that stands still has none."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One model in one window, means of its steps."""

    system: str
    model: str
    batch: float
    step: float
    """Milliseconds, as the others."""
    overlap: float
    alone: float
    """Of the same batch without another model and without hand-offs."""

    @property
    def part(self) -> float:
        """Of its steps that was overlapped."""
        return self.overlap / self.step


@dataclass(frozen=True, slots=True)
class Slope:
    """Of one model with one way of sharing."""

    value: float
    windows: int

    @property
    def factor(self) -> float:
        """The contention factor of `trouterd.batching.network.Network`."""
        return min(self.value, _MOST) / (1 - min(self.value, _MOST))


@dataclass(frozen=True, slots=True)
class Fit:
    """Of all windows."""

    slopes: Mapping[tuple[str, str], Slope]
    """By system and model; what never ran beside another one is missing."""
    more: Mapping[str, float]
    """Milliseconds that hand-offs add to a step for each request of its batch, by model."""

    def factors(self, system: str, models: Sequence[str]) -> tuple[float, ...] | None:
        """Contention of the models with a way of sharing; None where one of them is not known."""
        found = [self.slopes.get((system, model)) for model in models]
        known = tuple(slope.factor for slope in found if slope is not None)
        return known if len(known) == len(models) else None


def samples(system: str, window: Mapping[str, Any], alone: Mapping[str, StepTime]) -> Iterable[Sample]:
    """What a window says, by model.

    Args:
        system: the way of sharing.
        window: as in a result file.
        alone: step times of the models without another one, as far as they are known, by their live rows. What dead ones take,
            of requests that left in the step before, is taken for the work of hand-offs, or for the other model's.
    """
    for model, own in window["overlap"].items():
        if model in alone:
            time = 1e3 * alone[model].of(own["batch"])
            yield Sample(system, model, own["batch"], own["step_ms"], own["overlap_ms"], time)


def fit(found: Iterable[Sample]) -> Fit:
    """Least squares for each model on its own."""
    known = list(found)
    slopes: dict[tuple[str, str], Slope] = {}
    more: dict[str, float] = {}
    for model in dict.fromkeys(one.model for one in known):
        own = [one for one in known if one.model == model]
        more[model], by_system = _fit(own)
        slopes |= {(system, model): slope for system, slope in by_system.items()}
    return Fit(slopes, more)


def _fit(own: Sequence[Sample]) -> tuple[float, dict[str, Slope]]:
    """`more` and the slopes of one model."""
    systems = list(dict.fromkeys(one.system for one in own if one.part > _LEAST_OVERLAP))
    columns = [[one.overlap * (one.system == system) for one in own] for system in systems]
    # Where all windows are overlapped about alike, nothing tells what is from hand-offs.
    if len(own) > len(systems) and min(one.part for one in own) < _LITTLE_OVERLAP:
        columns.append([one.batch for one in own])
    if not columns:
        return 0.0, {}
    solution = _not_negative(np.array(columns).T, np.array([one.step - one.alone for one in own])).tolist()
    counts = {system: sum(one.system == system for one in own) for system in systems}
    slopes = {system: Slope(value, counts[system]) for system, value in zip(systems, solution, strict=False)}
    return (solution[-1] if len(solution) > len(systems) else 0.0), slopes


def _not_negative(columns: Floats, right: Floats) -> Floats:
    """Least squares whose unknowns are 0 or more: the most negative ones are left out in turn."""
    kept = list(range(columns.shape[1]))
    solution = np.zeros(columns.shape[1])
    while kept:
        found = np.linalg.lstsq(columns[:, kept], right, rcond=None)[0]
        if found.min() >= 0:
            solution[kept] = found
            break
        del kept[int(found.argmin())]
    return solution
