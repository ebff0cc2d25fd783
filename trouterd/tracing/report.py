"""What a trace sums up to: where each model's time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trouterd.table import table
from trouterd.tracing.events import Summary

_RATES = ("MODEL", "STEPS/S", "BATCH", "TOKEN/S")
_WAYS = ("BUSY", "OVERHEAD", "LOOP", "HELD", "NO ROOM", "NOTHING READY")
_HEAD = (*_RATES, *_WAYS, "PREFILL", "HAND-OFFS/S", "P50 MS", "P99 MS")
_SHARES = ("busy", "overhead", "loop", "held", "no_room", "nothing_ready")


def report(summary: Summary, start: float) -> dict[str, Any]:
    """One model's rates and shares, for JSON.

    Args:
        summary: the model's.
        start: when the first model began to record, seconds of CLOCK_MONOTONIC.
    """
    seconds = summary.seconds or 1.0
    p50, p99 = summary.latencies
    return {
        "seconds": summary.seconds,
        "late_seconds": summary.begin - start,
        "steps_per_second": summary.steps / seconds,
        "batch": summary.alive / summary.steps if summary.steps else 0.0,
        "tokens_per_second": summary.tokens / seconds,
        "shares": summary.shares,
        "prefill_of_busy": summary.prefill / summary.busy if summary.busy else 0.0,
        "handoffs_per_second": summary.handoffs / seconds,
        "handoff_ms": {"p50": p50 * 1e3, "p99": p99 * 1e3},
        "dropped_events": summary.dropped,
    }


def lines(reports: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """The same as a table; `{"error": ...}` for a model that gave no answer."""
    yield from table(_HEAD, [_cells(name, model) for name, model in reports.items()])


def _cells(name: str, model: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in model:
        return (name, model["error"], *[""] * (len(_HEAD) - 2))
    rates = (f"{model[key]:.1f}" for key in ("steps_per_second", "batch", "tokens_per_second"))
    shares = (f"{model['shares'][share]:.1%}" for share in _SHARES)
    waits = (f"{model['handoff_ms'][key]:.2f}" for key in ("p50", "p99"))
    return (name, *rates, *shares, f"{model['prefill_of_busy']:.1%}", f"{model['handoffs_per_second']:.1f}", *waits)
