"""By how much models of one GPU slow each other down: told from steps that ran beside others for different parts of their time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trouterd.batching.network import Floats
from trouterd.batching.placement import beside_each_other

_SPREAD = 0.15
"""Standard deviation of the overlap, of many steps and batches of a size, at which it counts as much as what is assumed."""
_STEEP = 4
"""Power of its variance by which it then soon counts alone: overlaps that hardly differ do so by errors of the clock as much."""
_FEW = 30
"""Steps that count as much as what is assumed at that deviation."""
_LEAST = 1e-9
"""Variance of overlaps that are all the same."""
_MOST = 9.0
"""A step that goes on at a tenth of its speed."""
_PRECISION = 1e-3
_TIME_SLICES = 1.0


@dataclass(frozen=True)
class Contention:
    """Of one model."""

    factor: float
    """As in `Network`."""
    told: float
    """Part that steps have in it, 0 to 1; the rest is what was assumed."""


def assumed(count: int, slowest: int) -> tuple[float, ...]:
    """Factors of models that share a GPU, as long as nothing is known: those of a pair as `batching plan` has them.

    Args:
        count: of the models.
        slowest: the one with the longest steps.
    """
    return beside_each_other(count, slowest) if count == 2 else (_TIME_SLICES,) * count


def fit_contention(batch: Floats, seconds: Floats, overlap: Floats, prior: float) -> Contention:
    """The factor with which what steps would have taken alone has nothing to do with how much they overlapped, batches of a size.

    Seconds of overlap are no measure of it, nor their least squares: a step that lasts longer for any reason overlaps for longer.

    Args:
        batch: [steps] requests.
        seconds: [steps].
        overlap: [steps] shares of their time during which others ran.
        prior: the factor that counts as far as overlaps do not differ.
    """
    columns = _by_size(batch)
    instrument = overlap - columns @ np.linalg.lstsq(columns, overlap, rcond=None)[0]
    whole = float(seconds.sum())
    variance = float(instrument @ (seconds * np.minimum(overlap, 1.0))) / whole
    if variance < _LEAST:
        return Contention(prior, 0.0)
    # What is assumed, as if told by overlaps of this variance.
    against = variance * (_SPREAD**2 / variance) ** _STEEP + _SPREAD**2 * _FEW / len(batch)
    low, high = 0.0, _MOST
    while high - low > _PRECISION:
        middle = (low + high) / 2
        drawn = whole * against * (_lost(prior) - _lost(middle))
        if float(instrument @ alone(seconds, overlap, middle)) + drawn > 0:
            low = middle
        else:
            high = middle
    return Contention(low, variance / (variance + against))


def alone(seconds: Floats, overlap: Floats, factor: float) -> Floats:
    """What steps would have taken without other models, which they ran beside for these shares of their time.

    Beside one other model a step goes on at 1 / (1 + factor) of its speed; shares above 1 are those of several models.
    """
    beside = np.minimum(overlap, 1.0)
    return np.asarray(seconds * (1 - beside + beside / (1 + factor * np.maximum(overlap, 1.0))))


def _lost(factor: float) -> float:
    """Share of the time beside another model by which a step is longer."""
    return factor / (1 + factor)


def _by_size(batch: Floats) -> Floats:
    """[steps, sizes]: columns that every function of the size is a sum of that is a line between powers of two."""
    knots = 2.0 ** np.arange(np.ceil(np.log2(batch.max())) + 1)
    return np.stack([np.interp(batch, knots, column) for column in np.eye(len(knots))], axis=1)
