"""Step times by requests and by the rows that each of them feeds: a visit feeds every token that the model has missed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from trouterd.batching.network import Floats, Network, NetworkError, StepTime


@dataclass(frozen=True)
class Extends:
    """Measured extend steps: what they take beyond the decode step of the same requests.

    Between measured sizes there are two readings: by requests and rows of each, a line in both directions; and by rows in all,
    which products go by, a line between all cases. The lower one holds, since a step's time rises the faster the more rows it has
    and a line over such a rise is too high. Measured cases stay what they are, but for one that took less than one with fewer rows
    of the same requests: it is taken to last as long.

    Beyond the most rows of a batch size only the rows in all count; beyond most of those, and beyond the largest batch, the time
    grows in proportion.

    Args:
        cases: (requests, rows of each, seconds more than with one row each), in any order; at least one, with two rows or more.

    Raises:
        NetworkError: no such case, or sizes and times out of range.
    """

    cases: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        if not self.cases:
            raise NetworkError("extend steps: none was measured")
        for batch, rows, seconds in self.cases:
            if batch < 1 or rows < 2 or not (math.isfinite(seconds) and seconds >= 0):
                raise NetworkError(f"extend steps: {seconds} s for {batch} requests of {rows} rows is out of range")

    @property
    def batches(self) -> tuple[int, ...]:
        """Measured ones, rising."""
        return tuple(sorted({batch for batch, _, _ in self.cases}))

    def seconds(self, batch: float, rows: float) -> float:
        """More than the decode step of these requests.

        Args:
            batch: requests.
            rows: of each, in the mean; 1 or more.
        """
        if rows <= 1:
            return 0.0
        curves = {
            own: _risen([(1.0, 0.0), *((float(count), more) for _, count, more in cases)])
            for own, cases in groupby(sorted(self.cases), key=lambda case: case[0])
        }
        in_all = _risen([(float(own * count), more) for own, count, more in self.cases])
        found = [_at(curve, own, rows, in_all) for own, curve in curves.items()]
        between = _in_proportion(batch, np.array(list(curves), dtype=np.float64), np.array(found))
        return min(between, _in_proportion(batch * rows, *in_all))


def _risen(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    """Sizes and seconds, by rising size, none cheaper than a smaller one."""
    sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*sorted(points), strict=True))
    return sizes, np.maximum.accumulate(seconds)


def _at(curve: tuple[Floats, Floats], batch: int, rows: float, in_all: tuple[Floats, Floats]) -> float:
    """Of a measured batch size; `in_all` is by rows of all requests."""
    if rows <= curve[0][-1]:
        return float(np.interp(rows, *curve))
    return _in_proportion(batch * rows, *in_all)


def _in_proportion(size: float, sizes: Floats, seconds: Floats) -> float:
    """A line between points, constant below them, beyond them in proportion to the last one."""
    return float(np.interp(size, sizes, seconds) * max(1.0, size / sizes[-1]))


@dataclass(frozen=True)
class RowTime:
    """Seconds of one step of a model by its requests and their rows.

    Args:
        decode: with one row per request.
        extends: what more rows take, as measured; None: nothing.
        per_row: seconds that every further row adds, in place of `extends`.

    Raises:
        NetworkError: a time that is negative.
    """

    decode: StepTime
    extends: Extends | None = None
    per_row: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_row) and self.per_row >= 0):
            raise NetworkError(f"step time: {self.per_row} s per row must be 0 or more")

    @classmethod
    def affine(cls, base: float, per_request: float = 0.0, per_row: float = 0.0) -> RowTime:
        """`base + per_request * batch + per_row * batch * rows` seconds."""
        return cls(StepTime.affine(base, per_request + per_row), None, per_row)

    def at(self, rows: float) -> StepTime:
        """By requests, where each of them feeds this many rows in the mean; `decode` where that is one."""
        if rows <= 1 or (self.extends is None and self.per_row == 0):
            return self.decode
        sizes = {size for size, _ in self.decode.points}
        if self.extends is not None:
            # Each of them: with the rows of a visit, lines by rows in all have their ends anywhere.
            sizes |= set(map(float, range(1, self.extends.batches[-1] + 1)))
        # Twice the largest: from there on the last slope goes on.
        sizes |= {2 * max(sizes)}
        return StepTime(tuple((size, self.decode.of(size) + self._more(size, rows)) for size in sorted(sizes)))

    def _more(self, batch: float, rows: float) -> float:
        measured = 0.0 if self.extends is None else self.extends.seconds(batch, rows)
        return measured + self.per_row * batch * (rows - 1)


def fed(network: Network, times: Sequence[RowTime]) -> Network:
    """The network with the step times that its routing implies: with `network.rows_per_step` rows per request.

    Args:
        network: whose own step times do not count.
        times: one per model.
    """
    steps = tuple(time.at(rows) for time, rows in zip(times, network.rows_per_step, strict=True))
    return replace(network, step_times=steps, decode_times=tuple(time.decode for time in times))


def rows_told(network: Network) -> str:
    """For a line about the network; '' where step times do not depend on rows."""
    if network.step_times == network.decode_times:
        return ""
    pairs = zip(network.names, network.rows_per_step, strict=True)
    return "; rows per request and step: " + ", ".join(f"{name} {rows:.1f}" for name, rows in pairs)
