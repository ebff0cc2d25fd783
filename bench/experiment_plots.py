"""The plot of each experiment."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.experiment_case import AUTO, EAGER, LARGE, PLANNED, STD
from bench.experiment_compared import system_name
from bench.experiment_group import Group, Measured
from bench.experiment_rates import at_rates
from bench.experiment_tables import factor
from bench.log_axes import plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (9.0, 5.5)
_DOTS = 150
"""Per inch."""
_TITLE_WIDTH = 100
"""Letters of a line of the title."""
_MARKERS = "osD^vP<>"
_REQUESTS = "requests in flight"
_RATE = "token/s; at the points: requests in flight"
_STD_MARKER = "x"
"""Of Std. Serving, whatever the colour."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture of a report."""

    path: Path
    shows: str
    """For who does not see it."""


def write_plots(group: Group, points: Sequence[dict[str, Any]], folder: Path) -> list[Plot]:
    """Draw a group into files of the folder; returns them. Needs matplotlib: the extra `bench`.

    Args:
        group: windows of an experiment.
        points: of a frontier, for experiment h.
        folder: where they go.
    """
    from matplotlib.figure import Figure

    experiment = str(group.head["experiment"])
    figures: list[tuple[str, list[str], Callable[[Axes], None]]] = []
    if points:
        figures.append(("", [], lambda axes: _quality(axes, points)))
    elif group.windows:
        several = _workloads(experiment, group)
        figures = [
            (
                f"-{short(workload)}" if len(several) > 1 else "",
                group.workloads() if experiment == "g" else [workload],
                _drawer(experiment, group, workload),
            )
            for workload in several
        ]
    written = []
    for suffix, workloads, draw in figures:
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        title = "; ".join([group.title, *workloads, str(group.head["hardware"])])
        axes.set_title(textwrap.fill(title, _TITLE_WIDTH), fontsize=10)
        axes.grid(alpha=0.3)
        _plain(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        path = folder / f"{experiment}-{group.head['pair']}-{group.head['placement']}{_settings(group)}{suffix}.png"
        figure.savefig(path, dpi=_DOTS)
        written.append(Plot(path, f"{axes.get_ylabel() or 'windows'}, by {axes.get_xlabel()}: {title}"))
    return written


def _plain(axes: Axes) -> None:
    """Numbers that are read at a glance; those of powers of two have been set, or stay."""
    if axes.get_yscale() == "log":
        plain_numbers(axes.yaxis)
    if axes.get_xscale() == "log" and axes.get_xlabel() != _REQUESTS:
        if axes.get_xlabel() == _RATE:
            plain_numbers(axes.xaxis)
        else:
            axes.xaxis.set_major_formatter("{x:g}")


def _settings(group: Group) -> str:
    """Fit for the name of a file."""
    return "".join(f"-{part}" for part in re.findall(r"[\w.]+", group.settings))


def _workloads(experiment: str, group: Group) -> list[str]:
    """A plot each; those of experiment g share one. Of a, c and f those of which the budget left more than the models alone."""
    if experiment in ("a", "c", "f"):
        compared = {one.case.workload for one in group.windows if one.case.subject in group.names}
        return [workload for workload in group.workloads() if workload in compared]
    return group.workloads()[:1] if experiment == "g" else group.workloads()


def short(workload: str) -> str:
    """Fit for the name of a file."""
    return Path(workload).name if Path(workload).suffix else workload.replace("/", "-")


def _drawer(experiment: str, group: Group, workload: str) -> Callable[[Axes], None]:
    draw = {
        "a": _compared,
        "b": _ablated,
        "c": _scaled_up,
        "d": _switched,
        "e": _mistaken,
        "f": _placed,
        "g": _lengthened,
    }[experiment]
    return lambda axes: draw(axes, group, workload)


def _line(
    axes: Axes, found: Sequence[tuple[float, float]], label: str, number: int, style: str = "-", marker: str = ""
) -> None:
    if found:
        marker = marker or _MARKERS[number % len(_MARKERS)]
        axes.plot(*zip(*sorted(found), strict=True), style, marker=marker, color=f"C{number}", label=label)


def _streams_axis(axes: Axes, counts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(count) for count in counts])
    axes.set_xlabel(_REQUESTS)


def _compared(axes: Axes, group: Group, workload: str) -> None:
    counts = group.streams(group.select(workload=workload))
    for number, subject in enumerate(group.subjects()):
        best = [group.best(workload, subject, count) for count in counts]
        _line(axes, _ratios(group, best), group.name(subject), number)
        std = group.select(system=STD, workload=workload, subject=subject)
        _line(axes, _ratios(group, std), f"{group.name(subject)}, Std. Serving", number, ":", _STD_MARKER)
    _baseline(axes, group)
    axes.set_yscale("log")
    axes.set_ylabel("token/s over large only, at nominal rates; routed: the fastest B")
    _streams_axis(axes, counts)


def _baseline(axes: Axes, group: Group) -> None:
    ways = [system_name(system) for system in group.large_systems]
    several = f"the fastest of {len(ways)}: " if len(ways) > 1 else ""
    axes.axhline(1.0, color="black", linewidth=1, label=f"large only, {several}{', '.join(ways)}")


def _ratios(group: Group, windows: Sequence[Measured | None]) -> list[tuple[float, float]]:
    found = []
    for one in windows:
        ratio = group.to_large(one) if one else None
        if one and ratio:
            found.append((float(one.case.streams), (at_rates(group, one, ratio) or ratio).value))
    return found


def _scaled_up(axes: Axes, group: Group, workload: str) -> None:
    counts = group.streams(group.windows)
    (subject, *_) = group.subjects()
    routed = [one for count in counts if (one := group.best(workload, subject, count))]
    lines = {
        f"routed: {group.name(subject)}": routed,
        **{
            f"large only, {system_name(system)}": group.select(system=system, workload=workload, subject=LARGE)
            for system in group.large_systems
        },
        "Std. Serving": group.select(system=STD, workload=workload, subject=subject),
    }
    for number, (label, found) in enumerate(lines.items()):
        points = [(one.case.streams, one.rate) for one in found]
        _line(axes, points, label, number, marker=_STD_MARKER if label == "Std. Serving" else "")
    axes.set_yscale("log")
    axes.set_ylabel("token/s")
    _streams_axis(axes, counts)


def _switched(axes: Axes, group: Group, workload: str) -> None:
    number = 0
    for count in group.streams(group.windows):
        for way in (EAGER, AUTO):
            found = [
                one
                for one in group.select(workload=workload, batching=way, streams=count)
                if ":" in one.case.subject and group.to_large(one)
            ]
            points = [
                (float(one.case.subject.partition(":")[2]), ratio.value)
                for one in found
                if (ratio := group.to_large(one))
            ]
            _line(axes, points, f"N = {count}, {way}", number)
            number += bool(points)
    _baseline(axes, group)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("every n-th token by the large model, n")
    axes.set_ylabel("token/s over large only")


def _mistaken(axes: Axes, group: Group, workload: str) -> None:
    number = 0
    for subject in group.subjects():
        for count in group.streams(group.select(subject=subject)):
            found = group.select(workload=workload, subject=subject, streams=count)
            right = next((one for one in found if one.case.batching == PLANNED), None)
            if right is None or not right.rate:
                continue
            own = [one for one in found if factor(one.case.batching) and not one.same_as]
            points = [(factor(one.case.batching), one.rate / right.rate) for one in own]
            _line(axes, points, f"{group.name(subject)}, N = {count}", number)
            number += 1
    axes.set_xscale("log", base=2)
    axes.set_xlabel("thresholds, times the planner's")
    axes.set_ylabel("token/s over the planner's")


def _placed(axes: Axes, group: Group, workload: str) -> None:
    (subject, *_) = group.subjects()
    for number, system in enumerate(dict.fromkeys(one.case.system for one in group.windows)):
        for way, style in ((PLANNED, "-"), (EAGER, ":")):
            found = group.select(system=system, workload=workload, subject=subject, batching=way)
            found = [one for one in found if one.of("gap_ms", "p99") is not None]
            points = [(one.rate, one.of("gap_ms", "p99") or 0.0) for one in found]
            _line(axes, points, f"{'as it is' if number == 0 else system}, {way}", number, style)
            for one, point in zip(found, points, strict=True):
                axes.annotate(str(one.case.streams), point, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(_RATE)
    axes.set_ylabel("gap between tokens, p99, ms")


def _lengthened(axes: Axes, group: Group, workload: str) -> None:
    del workload
    labels: list[str] = []
    kept: list[float] = []
    short, long = (group.workloads() * 2)[:2]
    for one in group.windows:
        case = one.case
        if case.workload != short or not one.rate:
            continue
        other = group.select(
            system=case.system, workload=long, subject=case.subject, batching=case.batching, streams=case.streams
        )
        if other:
            labels.append(f"{case.system}, {group.name(case.subject)} {case.batching}, N = {case.streams}")
            kept.append(other[0].rate / one.rate)
    axes.barh(labels, kept)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel(f"token/s kept, {long} against {short}")


def _ablated(axes: Axes, group: Group, workload: str) -> None:
    ways: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in group.windows:
        if one.case.workload == workload and one.case.subject in group.names:
            ways.setdefault((one.case.system, one.case.batching), []).append((one.case.streams, one.rate))
    for number, ((system, way), points) in enumerate(ways.items()):
        _line(axes, points, f"{system}, {way}" if way else system, number)
    axes.set_yscale("log")
    axes.set_ylabel("token/s")
    _streams_axis(axes, group.streams(group.windows))


def _quality(axes: Axes, points: Sequence[dict[str, Any]]) -> None:
    most = max(point["tokens_per_second"] for point in points)
    names = list(dict.fromkeys(point["sweep"] for point in points))
    for number, name in enumerate(names):
        own = [point for point in points if point["sweep"] == name]
        axes.scatter(
            [100 * point["large_share"] for point in own],
            [100 * point["accuracy"] for point in own],
            s=[400 * point["tokens_per_second"] / most for point in own],
            marker=_MARKERS[number % len(_MARKERS)],
            color=f"C{number % 10}",
            alpha=0.7,
            label=name,
        )
    axes.set_xlabel(f"tokens by the large model, %; area: token/s, the largest {most:,.0f}")
    axes.set_ylabel("right answers, %")
