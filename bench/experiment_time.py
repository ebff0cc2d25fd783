"""Where the time of requests goes: steps of either model, what steps cost more than alone, and waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.experiment_case import LARGE, SMALL
from bench.experiment_group import Group, Measured
from bench.experiment_markdown import WAYS, cell, percent, table
from bench.experiment_steps import mean_step

_WAITING = "waiting for a launch and hand-offs"


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of a request's time, per token of its answer."""

    total: float
    small: float
    """In steps of the small model."""
    small_alone: float | None
    """The same steps at the pace that the model has when it is alone, with as many streams."""
    large: float
    large_alone: float | None

    @property
    def waiting(self) -> float:
        """In no step: hand-offs, and waits for a launch."""
        return max(0.0, self.total - self.small - self.large)

    @property
    def paced(self) -> float | None:
        """Part of the time that the same steps take at the pace that the models have alone."""
        if self.small_alone is None or self.large_alone is None:
            return None
        return (self.small_alone + self.large_alone) / self.total

    @property
    def cause(self) -> str:
        """What takes most of the time that need not be."""
        parts = {_WAITING: self.waiting}
        if self.small_alone is not None:
            parts["steps of the small model that are longer than alone"] = self.small - self.small_alone
        if self.large_alone is not None:
            parts["steps of the large model that are longer than alone"] = self.large - self.large_alone
        worst = max(parts, key=lambda name: parts[name])
        return self._told(worst, parts[worst])

    @property
    def waited(self) -> str:
        """What lacks to the ideal, to which longer steps are no loss."""
        return self._told(_WAITING, self.waiting)

    def _told(self, what: str, time: float) -> str:
        return f"{what}: {cell(time)} of {cell(self.total)} ms per token"


def spent(group: Group, one: Measured) -> Spent | None:
    """Of a window of two models; None where the system says nothing of their steps."""
    if len(one.record.window.get("batch") or {}) != 2:
        return None
    small, large = _in_steps(one, SMALL), _in_steps(one, LARGE)
    if small is None or large is None or not one.rate:
        return None
    per_token = 1e3 / one.rate
    return Spent(
        total=one.case.streams * per_token,
        small=small * per_token,
        small_alone=_alone(group, one, SMALL, small * per_token),
        large=large * per_token,
        large_alone=_alone(group, one, LARGE, large * per_token),
    )


def _in_steps(one: Measured, name: str) -> float | None:
    """Requests in a step of the model, in the mean."""
    batch, busy = one.of("batch", name), one.of("busy", name)
    return None if batch is None or busy is None else batch * busy


def _alone(group: Group, one: Measured, name: str, time: float) -> float | None:
    """The time that it would be, were each step as long as the same batch's is for the model alone."""
    step, alone = mean_step(one.record.window, name), alone_ms(group, one, name)
    return time * alone / step[1] if step and alone else None


def alone_ms(group: Group, one: Measured, name: str) -> float | None:
    """Milliseconds of a step of the window's batch, for the model alone with one row a request: with that way to serve, if it was
    measured there, else with trouterd as it is, unless the model's steps are others there; None: not known."""
    case, step = one.case, mean_step(one.record.window, name)
    found = group.select(system=case.system, workload=case.workload, subject=name)
    if not found and name not in case.changed:
        found = group.select(workload=case.workload, subject=name)
    points = sorted(point for other in found if (point := mean_step(other.record.window, name)))
    return _between(points, step[0]) if points and step else None


def _between(points: Sequence[tuple[float, float]], size: float) -> float:
    """On the line through points, by rising size; constant outside."""
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if left <= size <= right and right > left:
            return low + (high - low) * (size - left) / (right - left)
    return points[0][1] if size < points[0][0] else points[-1][1]


def spent_table(group: Group, windows: Iterable[Measured]) -> str:
    """A row for each routed window."""
    times = ("ms per token", "small steps", "were it alone", "large steps", "were it alone", "in none")
    parts = ("of ideal", "at the pace alone")
    head = ("system", "asked", "B", "N", *times, *parts)
    rows = []
    for one in windows:
        found = spent(group, one)
        if found is not None:
            spans = (found.total, found.small, found.small_alone, found.large, found.large_alone, found.waiting)
            way = WAYS.get(one.case.batching, one.case.batching)
            rows.append(
                (
                    one.case.system,
                    group.name(one.case.subject),
                    way,
                    one.case.streams,
                    *spans,
                    percent(one.of_ideal),
                    percent(found.paced),
                )
            )
    return table(head, rows, 3)


def visit_price(group: Group, one: Measured) -> float | None:
    """Milliseconds that a visit of the large model costs a request beside its steps: the time from one visit to the next, less the
    steps of either model, each as long as for that model alone with a batch like the window's.

    So it holds two hand-offs, waiting for a launch, and what steps take longer for the rows of a visit and beside each other.
    None: not known.
    """
    time, handoffs = spent(group, one), one.of("handoffs_per_100")
    if time is None or not handoffs or time.small_alone is None or time.large_alone is None:
        return None
    return (time.total - time.small_alone - time.large_alone) * 200 / handoffs
