"""Whether a pattern pays at a number of streams: its token/s by those of the large model alone, and what that may be off by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from bench.experiment_group import Group, Measured, Ratio
from bench.experiment_rates import at_rates, chance, correction

LEAST_ERROR = 0.05
"""By which single windows of the same thing differ from run to run: two on one H200 did by up to 3 % (docs/performance.md)."""
Says = Literal["pays", "costs speed", "no difference"]


@dataclass(frozen=True, slots=True)
class Point:
    """A pattern at a number of streams."""

    window: Measured
    large: Measured
    """Without routing, in the fastest way that was measured."""
    ratio: Ratio
    """Token/s by its, at the rates that the draws should have had where that is known."""
    low: float
    high: float
    """Between which it is."""
    repeated: bool
    """That is from lowest to highest of several windows, and not an estimate from one."""
    cost: Ratio | None
    """GPU-seconds of a token, by the large model's, at the same rates."""

    @property
    def says(self) -> Says:
        """Pays: all that the ratio may be is above 1."""
        return "pays" if self.low > 1 else "costs speed" if self.high < 1 else "no difference"

    @property
    def error(self) -> float:
        """Half of the way from low to high, as a part of the ratio."""
        return (self.high - self.low) / 2 / self.ratio.value

    @property
    def tail(self) -> float | None:
        """99th percentile of the gaps between tokens, by the large model's."""
        own, others = (one.time_of("gap_ms", "p99") for one in (self.window, self.large))
        return own / others if own is not None and others else None


def verdict(group: Group, workload: str) -> dict[str, list[Point]]:
    """Points of every pattern that can be compared, by streams: as the daemon waits unless told otherwise (learned B), and where
    that was not measured in the fastest way that was."""
    found: dict[str, list[Point]] = {}
    for subject in group.subjects():
        for count in group.streams(group.select(workload=workload, subject=subject)):
            one = group.learned(workload, subject, count) or group.best(workload, subject, count)
            if one is not None and (point := _point(group, one)) is not None:
                found.setdefault(subject, []).append(point)
    return found


def _point(group: Group, one: Measured) -> Point | None:
    large, measured = group.best_large(one), group.to_large(one)
    if large is None or measured is None:
        return None
    ratio, cost = at_rates(group, one, measured) or measured, group.cost(one, "gpu_seconds_per_1000")
    if cost and (factor := correction(group, one)):
        cost = cost.times(1 / factor)
    spread, of_large = one.spread, large.spread or (large.rate, large.rate)
    if spread:
        low, high = spread[0] / one.rate * large.rate / of_large[1], spread[1] / one.rate * large.rate / of_large[0]
    else:
        error = max(LEAST_ERROR, 2 * chance(group, one))
        low, high = 1 - error, 1 + error
    return Point(one, large, ratio, ratio.value * low, ratio.value * high, bool(spread), cost)


def sentence(name: str, points: Sequence[Point], counts: Sequence[int]) -> str:
    """Such as `R2R pays at N = 1 to 16 (1.25 to 1.53 times the baseline), makes no difference at 64 within the error (1.03)`.

    Rule: neighbouring numbers of streams of which the same can be said are told together, with lowest and highest ratio.

    Args:
        name: of the pattern.
        points: of it, by streams, one or more.
        counts: all numbers of streams that others have: where one is skipped there is no range, but each number.
    """
    told = []
    for number, (_, group) in enumerate(groupby(points, key=lambda point: point.says)):
        run = list(group)
        at = f"at {'N = ' if not number else ''}{_numbers([point.window.case.streams for point in run], counts)}"
        ratios = _range([point.ratio.value for point in run], ".2f") + max(point.ratio.mark for point in run)
        what = f"{ratios} times the baseline" if not number else ratios
        told.append(_CLAUSES[run[0].says].format(at=at, ratio=what))
    tails = [point.tail for point in points if point.tail is not None]
    tail = f"; gap between tokens, p99: {_range(tails, '.2g')} times the baseline's" if tails else ""
    return f"**{name}** {', '.join(told)}{tail}{_other_cost(points)}."


_CLAUSES: dict[Says, str] = {
    "pays": "pays {at} ({ratio})",
    "costs speed": "costs speed {at} ({ratio})",
    "no difference": "makes no difference {at} within the error ({ratio})",
}


def _other_cost(points: Sequence[Point]) -> str:
    """Told where it does not follow from speed: with other GPUs than the large model has alone."""
    costs = [point.cost.value for point in points if point.cost]
    if all(abs(point.cost.value * point.ratio.value - 1) < _SAME for point in points if point.cost):
        return ""
    return f"; {'but ' if min(costs) > 1 else ''}a token costs {_range(costs, '.2f')} times as much"


_SAME = 0.02


def _numbers(streams: Sequence[int], counts: Sequence[int]) -> str:
    """`1 to 16`, or `1, 4 and 16` where others have numbers between them."""
    between = [count for count in counts if streams[0] <= count <= streams[-1]]
    if len(streams) > 1 and len(between) == len(streams):
        return f"{streams[0]} to {streams[-1]}"
    *others, last = map(str, streams)
    return f"{', '.join(others)} and {last}" if others else last


def _range(values: Sequence[float], form: str) -> str:
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
