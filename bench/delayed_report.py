"""What bench.delayed measured, as a table and as plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from bench.delayed import PATTERNS, Report, Run


def markdown(report: Report) -> Iterable[str]:
    """As text, by lines: medians of the windows of one kind, with the least and the most in brackets where it matters."""
    wanted, delays = (" and ".join(f"{ms:.2f}" for ms in row) for row in (report.step_ms, report.delays_ms))
    yield f"Scripted steps that were to take {wanted} ms; windows of {report.seconds:g} s, in turns."
    yield f"Delays of {delays} ms, found while other programs kept {report.calibration_others:.2f} CPUs busy."
    yield ""
    counts = (
        "token/s",
        "predicted",
        "error",
        "x eager",
        "mean batches",
        "steps, ms",
        "hand-off, ms",
        "hand-overs",
        "others",
    )
    head = ("pattern", "requests", "how", "B", "windows", *counts)
    yield f"| {' | '.join(head)} |"
    yield "|---|---:|---|" + "---:|" * (len(head) - 3)
    for runs in kinds(report.runs):
        yield f"| {' | '.join(_cells(runs))} |"
    yield ""
    yield "Others: CPUs that other programs kept busy, most of any window. Step times of the eager windows, simulated:"
    for count, rate in report.synchronous.items():
        yield f"Models that step together, {count} requests: {rate:.1f} token/s."


def kinds(runs: Iterable[Run]) -> Iterable[list[Run]]:
    """Windows of one kind together, in the order in which the first of each was taken."""
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        thresholds = () if run.how == "controller" else run.thresholds
        found.setdefault((run.pattern, run.requests, run.how, thresholds), []).append(run)
    return found.values()


def _cells(runs: Sequence[Run]) -> tuple[str, ...]:
    def spread(value: Callable[[Run], float], digits: int) -> str:
        values = sorted(map(value, runs))
        return f"{median(values):.{digits}f} ({values[0]:.{digits}f}-{values[-1]:.{digits}f})"

    def each(values: Callable[[Run], tuple[float, ...]], digits: int) -> str:
        return ", ".join(f"{median(column):.{digits}f}" for column in zip(*map(values, runs), strict=True))

    last = runs[-1]
    return (
        last.pattern,
        str(last.requests),
        last.how,
        ", ".join(map(str, last.thresholds)),
        str(len(runs)),
        spread(lambda run: run.measured, 1),
        f"{median(run.predicted for run in runs):.1f}",
        f"{median(run.predicted / run.measured for run in runs) - 1:+.1%}",
        spread(lambda run: run.over_eager, 3),
        each(lambda run: run.batches, 1),
        each(lambda run: run.step_ms, 2),
        f"{median(run.handoff_ms for run in runs):.2f}",
        f"{median(run.share for run in runs):.3f}",
        f"{max(run.others for run in runs):.2f}",
    )


def plots(report: Report, folder: Path) -> list[Path]:
    """Loss curve and patterns as PNG files. Needs matplotlib: the extra `bench`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, title, rows in (
        ("thresholds", "geometric runs", _curves(report)),
        ("patterns", "other runs", _patterns(report)),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for label, points in rows.items():
            axes.plot(list(points), list(points.values()), marker="o", label=label)
        axes.set_ylabel("token/s over eager, median")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        path = folder / f"delayed-{name}.png"
        figure.savefig(path, dpi=150, bbox_inches="tight")
        pyplot.close(figure)
        found.append(path)
    return found


def _curves(report: Report) -> Mapping[str, Mapping[str, float]]:
    tries = [run for run in report.runs if run.pattern == "geometric" and run.how != "controller"]
    return {
        f"{count} requests": _over_eager([run for run in tries if run.requests == count])
        for count in report.synchronous
    }


def _patterns(report: Report) -> Mapping[str, Mapping[str, float]]:
    hows = ("eager", "B*", "controller")
    seen = [
        pattern for pattern in PATTERNS if any(run.pattern == pattern and run.how == hows[-1] for run in report.runs)
    ]
    middle = {run.requests for run in report.runs if run.how == hows[-1]}
    return {
        pattern: _over_eager(
            [r for r in report.runs if r.pattern == pattern and r.how in hows and r.requests in middle]
        )
        for pattern in seen
    }


def _over_eager(runs: Sequence[Run]) -> dict[str, float]:
    hows = dict.fromkeys(run.how for run in runs)
    return {how: median(run.over_eager for run in runs if run.how == how) for how in hows}
