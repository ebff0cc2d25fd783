"""The tables of a throughput report, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.percentiles import Percentiles
from bench.repeats import spread
from bench.window import Window

_NOTES = """\
N requests are under way all the time. Of several windows with seeds of their own there is the mean, and the token/s of the lowest
and the highest one. Times are means, then medians, 95th percentiles of 20 or more, and 99th of 100 or more. *Gap*: from one arrival
of tokens to the next of the same answer. *First token*: in brackets how many; with a star, no request began in the window, and the
times are those of all N beginning at once, with prompts that hold what they are supposed to have written. *Whole answer*: of the
*answers* that ended in the window and began after the start. *Estimated*: the mean of these, from the time to the first token and
the mean time per token.
*Handed on*: of a model's decisions, those that sent their request to another one. *Hand-off*: mean time from sending a request to
another model until the step that takes it; *held*: for how long launches waited for more requests, in the mean; *waited*: for how
long a request that a model could have served, whatever had brought it there, waited for its launch: mean / 99th percentile.
*Cached*: of the tokens of requests that came to a model in the window, those that its prefix cache had. *Of ideal*: token/s
divided by those of requests that never wait, in steps as long as in the mean of that window and with its moves. *GPU-s*: GPUs times
seconds, idle time included. *Large steps*: forward passes of the large model. "-": the system does not say, or nothing was seen.
"""


_TIMES = "Times are: mean; median, 95th and 99th percentile."
_STAND_IN = "*Device-s*: no GPU is known of here, so that each model on none counts as a device of its own.\n"


def report(windows: Sequence[Window], head: str, device: str = "GPU") -> str:
    """All tables, one section for each workload.

    Args:
        windows: what was measured.
        head: what to say first: of what, where, how.
        device: in whose seconds cost is told: "GPU", or "device" where there is none.
    """
    parts = [head.rstrip(), ""]
    for workload in dict.fromkeys(window.workload for window in windows):
        own = [window for window in windows if window.workload == workload]
        parts += [f"## {workload}", "", _TIMES, "", speed_table(own), inside_table(own, device)]
    return "\n".join([*parts, _NOTES]) + ("" if device == "GPU" else _STAND_IN)


def large_only(windows: Sequence[Window]) -> str:
    """Name of the system in which the large model writes everything; '' if there is none."""
    for window in windows:
        if (large := window.extra.get("large")) and set(window.tokens_per_model) == {large}:
            return window.system
    return ""


def ratio(window: Window, windows: Sequence[Window], reference: str) -> float | None:
    """Token/s over those of a system at the same workload and number of streams; None where that was not measured."""
    for other in windows:
        if (other.system, other.workload, other.streams) == (reference, window.workload, window.streams):
            return window.tokens_per_second / other.tokens_per_second
    return None


def speed_table(windows: Sequence[Window]) -> str:
    """What clients get."""
    reference = large_only(windows)
    rows = [
        {
            "system": window.system,
            "N": str(window.streams),
            "token/s": number(window.tokens_per_second) + _between(window),
            f"x {reference or 'large'}": _maybe(ratio(window, windows, reference), 2),
            "token/s per user": number(window.tokens_per_second / window.streams),
            "first token, ms": _first(window),
            "gap, ms": _times(window.gap_ms),
            "whole answer, s": _times(window.request_ms, 1e-3),
            "answers": str(window.requests),
            "estimated, s": _maybe(_seconds(window.extra.get("request_estimate_ms")), 1),
        }
        for window in windows
    ]
    return _table(rows)


def inside_table(windows: Sequence[Window], device: str) -> str:
    """What it takes."""
    rows = []
    for window in windows:
        written = sum(window.tokens_per_model.values())
        delays = [window.extra.get(name) for name in ("handoff_ms", "held_ms")]
        handoff, held = (delay if isinstance(delay, float) else None for delay in delays)
        shares = {name: 100 * rate / written for name, rate in window.tokens_per_model.items()}
        rows.append(
            {
                "system": window.system,
                "N": str(window.streams),
                "% of tokens": _each(shares, 1),
                "handed on, %": _each({name: 100 * part for name, part in window.handed.items()}, 1),
                "hand-offs per 100": _maybe(window.handoffs_per_100, 1),
                "batch": _each(window.batch, 1),
                "step, ms": _each(window.step_ms, 2),
                "busy, %": _each({name: 100 * part for name, part in window.busy.items()}, 0),
                "hand-off, ms": _maybe(handoff, 1),
                "held, ms": _maybe(held, 1),
                "waited, ms": _waited(window.wait_ms),
                "cached, %": _each({name: 100 * part for name, part in window.cached.items()}, 0),
                "of ideal": "-" if window.ideal is None else f"{window.tokens_per_second / window.ideal:.0%}",
                f"{device}-s per 1,000": number(window.gpu_seconds_per_1000),
                "large steps per 1,000": _maybe(window.large_forwards_per_1000, 0),
            }
        )
    return _table(rows)


def number(value: float) -> str:
    """With three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """The first column is text, all others are numbers."""
    head = list(rows[0])
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _between(window: Window) -> str:
    """Lowest and highest of its repeats."""
    found = spread(window)
    return f" ({number(found[0])} to {number(found[1])})" if found else ""


def _maybe(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _each(values: Mapping[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items()) or "-"


def _waited(times: Mapping[str, Percentiles]) -> str:
    """Means and 99th percentiles."""
    return ", ".join(f"{name} {own.mean:.2f} / {_maybe(own.p99, 2)}" for name, own in times.items()) or "-"


def _seconds(milliseconds: float | str | None) -> float | None:
    return milliseconds / 1e3 if isinstance(milliseconds, int | float) else None


def _first(window: Window) -> str:
    """Times to the first token, whether they are of the start, and how many."""
    times = window.ttft_ms
    star = "*" if window.extra.get("ttft_of") == "start" else ""
    return _times(times) + star + (f" ({times.count})" if times and times.count else "")


def _times(times: Percentiles | None, factor: float = 1.0) -> str:
    if times is None:
        return "-"
    values = (times.mean, times.p50, times.p95, times.p99)
    mean, *others = ("-" if value is None else number(factor * value) for value in values)
    return f"{mean}; {', '.join(others)}"
