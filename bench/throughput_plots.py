"""The plots of a throughput report: speed, latency and cost over the number of streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.log_axes import plain_numbers
from bench.throughput_report import large_only, ratio
from bench.window import Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (13.0, 9.0)
_DOTS = 120
"""Per inch of a PNG."""
_MARKERS = "osD^vPX<>hp*d"

Value = Callable[[Window], float | None]


def write_plots(windows: Sequence[Window], folder: Path, device: str = "GPU") -> list[Path]:
    """A figure for each workload, as PNG and as SVG; needs matplotlib (the extra `bench`).

    Args:
        windows: what was measured.
        folder: that is there.
        device: in whose seconds cost is told.

    Returns:
        The files.
    """
    from matplotlib.figure import Figure

    files = []
    for number, workload in enumerate(dict.fromkeys(window.workload for window in windows), 1):
        figure = Figure(figsize=_INCHES, layout="constrained")
        figure.suptitle(workload)
        axes = list(figure.subplots(2, 2).flat)
        _panels(axes, [window for window in windows if window.workload == workload], device)
        for panel in axes:
            if panel.get_yscale() == "log":
                plain_numbers(panel.yaxis)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        for suffix in ("png", "svg"):
            files.append(folder / f"throughput-{number}.{suffix}")
            figure.savefig(files[-1], dpi=_DOTS)
    return files


def _panels(axes: Sequence[Axes], windows: Sequence[Window], device: str) -> None:
    speed, user, gap, cost = axes
    reference = large_only(windows)
    if reference:
        _draw(speed, windows, lambda window: ratio(window, windows, reference))
        speed.set_ylabel(f"token/s over {reference}")
        speed.axhline(1, color="0.6", zorder=0)
    else:
        _draw(speed, windows, lambda window: window.tokens_per_second)
        speed.set(ylabel="token/s", yscale="log")
    _draw(user, windows, lambda window: window.tokens_per_second / window.streams)
    user.set_ylabel("token/s per user")
    _draw(gap, windows, lambda window: window.gap_ms.p50 if window.gap_ms else None)
    _draw(gap, windows, lambda window: window.gap_ms.p99 if window.gap_ms else None, dashed=True)
    gap.set(ylabel="gap between tokens, ms (dashed: 99th percentile)", yscale="log")
    _draw(cost, windows, lambda window: window.gpu_seconds_per_1000)
    cost.set(ylabel=f"{device}-seconds per 1,000 tokens", yscale="log")


def _draw(axes: Axes, windows: Sequence[Window], value: Value, *, dashed: bool = False) -> None:
    for number, system in enumerate(dict.fromkeys(window.system for window in windows)):
        points = [(w.streams, y) for w in windows if w.system == system and (y := value(w)) is not None]
        axes.plot(
            [streams for streams, _ in points],
            [y for _, y in points],
            "--" if dashed else "-",
            marker=_MARKERS[number % len(_MARKERS)],
            color=f"C{number % 10}",
            label=system,
        )
    counts = sorted({window.streams for window in windows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("requests under way")
    axes.grid(alpha=0.3)
