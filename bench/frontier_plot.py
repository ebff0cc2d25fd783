"""The plot of a frontier: accuracy over the large model's share of the tokens, and over its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.frontier_fault import FrontierError
from bench.frontier_point import Point
from bench.frontier_report import LARGE, MARGIN, SMALL, pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX<>hp*d"
_INCHES = (13.0, 6.5)
_DOTS = 150
"""Per inch of the PNG."""
_ENDS = {SMALL: "s", LARGE: "*"}
"""Markers of the two models alone."""


def require_matplotlib() -> None:
    """
    Raises:
        FrontierError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FrontierError(f"the plot needs matplotlib: pip install 'trouterd[bench]' ({error})") from error


def write_plot(points: Sequence[Point], title: str, files: Sequence[Path]) -> None:
    """Draw the points into files; their suffixes say in which format.

    Args:
        points: those of the two models alone among them.
        title: of the whole figure.
        files: .png, .svg, ...
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    routed = [point for point in points if not point.reference or point.sweep in _ENDS]
    _draw(left, points, lambda point: 100 * point.large_share, routed)
    left.set_xlabel("tokens by the large model, %")
    left.set_ylabel("right answers, %")
    # Here speculative decoding can be compared: all its tokens are the large model's, whoever wrote them first.
    _draw(right, points, lambda point: point.large_forwards, points)
    right.set_xlabel("forward passes of the large model per answer")
    figure.suptitle(title)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    for file in files:
        figure.savefig(file, dpi=_DOTS)


def _draw(axes: Axes, points: Sequence[Point], cost: Callable[[Point], float], compared: Sequence[Point]) -> None:
    large = next(point for point in points if point.sweep == LARGE)
    near = 100 * (large.accuracy - MARGIN)
    axes.axhspan(near, 100 * large.accuracy, color="0.92", zorder=0, label=f"within {100 * MARGIN:g} points of large")
    best = pareto(compared, cost)
    axes.step(
        [cost(point) for point in best],
        [100 * point.accuracy for point in best],
        where="post",
        color="0.6",
        linewidth=5,
        alpha=0.5,
        zorder=1,
        label="Pareto line",
    )
    names = list(dict.fromkeys(point.sweep for point in points))
    lines = [name for name in names if name not in _ENDS]
    for number, name in enumerate(lines):
        own = [point for point in points if point.sweep == name]
        axes.plot(
            [cost(point) for point in own],
            [100 * point.accuracy for point in own],
            label=name,
            **_style(number, own[0].reference),
        )
    for name, marker in _ENDS.items():
        for point in points:
            if point.sweep == name:
                axes.plot(
                    [cost(point)], [100 * point.accuracy], marker, color="black", markersize=13, zorder=4, label=name
                )
    axes.grid(alpha=0.3)


def _style(number: int, reference: bool) -> dict[str, Any]:
    if reference:
        return {"color": "black", "linestyle": ":", "marker": "x", "markersize": 9, "zorder": 4}
    marker = _MARKERS[number % len(_MARKERS)]
    return {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "marker": marker, "zorder": 3}
