"""The tables of a frontier, its Pareto line, and each algorithm's cheapest point that is as good as the large model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.frontier_point import Point

SMALL, LARGE = "small only", "large only"
"""Lines of the two models alone."""
MARGIN = 0.02
"""Accuracy that a point may lack against the large model's and still count as good as it."""
_HEAD = """\
| {} | {} | right | tokens by large | hand-offs per 100 tokens | token/s | large forward passes per answer |
|---|---|---:|---:|---:|---:|---:|
"""


def resolution(questions: int) -> str:
    """How finely so many questions measure accuracy."""
    lacking = int(MARGIN * questions + 1e-9)
    answers = f"{lacking} answer{'' if lacking == 1 else 's'}" if lacking else "no answer"
    return (
        f"One answer is {100 / questions:.2g} points: within {MARGIN * 100:g} points of the large model is what lacks"
        f" {answers} against it."
    )


def pareto(points: Sequence[Point], cost: Callable[[Point], float]) -> list[Point]:
    """The points that no other one beats in both accuracy and cost, by cost."""
    best: list[Point] = []
    for point in sorted(points, key=lambda one: (cost(one), -one.accuracy)):
        if not best or point.accuracy > best[-1].accuracy:
            best.append(point)
    return best


def good_enough(points: Sequence[Point], accuracy: float) -> dict[str, Point | None]:
    """Sweep -> its point of the lowest large share that is within `MARGIN` of an accuracy; None for a sweep that has none."""
    chosen: dict[str, Point | None] = {}
    for point in points:
        kept = chosen.setdefault(point.sweep, None)
        near = point.accuracy >= accuracy - MARGIN - 1e-9
        if near and (kept is None or point.large_share < kept.large_share):
            chosen[point.sweep] = point
    return chosen


def points_table(points: Sequence[Point]) -> str:
    """All points in Markdown, the reference points first."""
    ordered = sorted(points, key=lambda point: not point.reference)
    return _HEAD.format("algorithm", "at") + "".join(_row(point) for point in ordered)


def good_enough_table(points: Sequence[Point]) -> str:
    """In Markdown, by large share: what each line needs to come near the large model; then those that never do."""
    large = next(point for point in points if point.sweep == LARGE)
    chosen = good_enough([point for point in points if point.sweep not in (SMALL, LARGE)], large.accuracy)
    reached = sorted((point for point in chosen.values() if point), key=lambda point: point.large_share)
    rows = [_row(point) for point in (*reached, large)]
    rows += [f"| {name} | not reached | | | | | |\n" for name, point in chosen.items() if point is None]
    return _HEAD.format("algorithm", f"cheapest point within {MARGIN * 100:g} points of the large model") + "".join(
        rows
    )


def _row(point: Point) -> str:
    return (
        f"| {point.sweep} | {point.setting} | {point.accuracy:.1%} | {point.large_share:.1%}"
        f" | {point.handoffs_per_100:.1f} | {point.tokens_per_second:,.0f} | {point.large_forwards:.1f} |\n"
    )
