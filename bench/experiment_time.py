"""Where the time of requests goes: steps of either model, what steps cost more than alone, and waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.experiment_case import LARGE, SMALL
from bench.experiment_group import Group, Measured
from bench.experiment_markdown import WAYS, cell, table
from bench.experiment_steps import mean_step


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
    def cause(self) -> str:
        """What takes most of the time that need not be."""
        parts = {"waiting for a launch and hand-offs": self.waiting}
        if self.small_alone is not None:
            parts["steps of the small model that are longer than alone"] = self.small - self.small_alone
        if self.large_alone is not None:
            parts["steps of the large model that are longer than alone"] = self.large - self.large_alone
        worst = max(parts, key=lambda name: parts[name])
        return f"{worst}: {cell(parts[worst])} of {cell(self.total)} ms per token"


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
    head = ("system", "asked", "B", "N", *times)
    rows = []
    for one in windows:
        found = spent(group, one)
        if found is not None:
            spans = (found.total, found.small, found.small_alone, found.large, found.large_alone, found.waiting)
            way = WAYS.get(one.case.batching, one.case.batching)
            rows.append((one.case.system, group.name(one.case.subject), way, one.case.streams, *spans))
    return table(head, rows, 3)


def handoff_price(group: Group, one: Measured) -> float | None:
    """Milliseconds that one hand-off costs a request beside the models' steps; among several streams with the wait for a launch.

    What a request spends in no step anyway, between one step of the small model and the next, is taken from the window of that
    model alone.
    """
    handoffs, idle = one.of("handoffs_per_100"), _idle(one)
    alone = group.best(one.case.workload, SMALL, one.case.streams)
    usual = _idle(alone) if alone else None
    if not handoffs or idle is None or usual is None:
        return None
    return 100 * max(0.0, idle - usual) / handoffs


def _idle(one: Measured) -> float | None:
    """Milliseconds in no step, per token."""
    batch, busy = one.record.window.get("batch") or {}, one.record.window.get("busy") or {}
    if not batch or not one.rate:
        return None
    in_steps = sum(float(batch[name]) * float(busy[name]) for name in batch)
    return 1e3 * (one.case.streams - in_steps) / one.rate
