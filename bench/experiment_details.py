"""Every window of an experiment with all of its figures, in Markdown."""

from __future__ import annotations

from bench.experiment_group import Group, Measured
from bench.experiment_markdown import batching, by_model, cell, percent, table
from bench.experiment_rates import at_rates, rates

_WINDOW = ("system", "asked", "workload", "B", "N")


def details(group: Group) -> str:
    """Throughput and what it takes, of every window."""
    head = (
        *(*_WINDOW, "token/s", "x large only", "x routed daemon's large", "drawn", "at nominal rates", "of ideal"),
        *(
            "predicted",
            "by model, token/s",
            "hand-offs / 100",
            f"{group.device}-s / 1,000",
            "large steps / 1,000",
            "batches",
        ),
        *("steps, ms", "held, ms", "hand-off, ms", "cached"),
    )
    rows = [
        (
            *_window(group, one),
            rate(one),
            group.to_large(one),
            group.to_routed_large(one),
            rates(one),
            at_rates(group, one, group.to_large(one)),
            percent(one.of_ideal),
            one.record.facts.get("predicted"),
            by_model(one.record.window.get("tokens_per_model")),
            one.of("handoffs_per_100"),
            one.of("gpu_seconds_per_1000"),
            one.of("large_forwards_per_1000"),
            by_model(one.record.window.get("batch")),
            by_model(one.record.window.get("step_ms")),
            one.of("extra", "held_ms"),
            one.of("extra", "handoff_ms"),
            by_model(one.record.window.get("cached")),
        )
        for one in group.windows
    ]
    return table(head, rows, 4)


def latencies(group: Group) -> str:
    """What clients and requests waited for, of every window: mean, and percentiles as far as there are enough of them."""
    figures = [f"{what} {which}" for what in _FIELDS.values() for which in _PARTS]
    rows = [
        (
            *_window(group, one),
            *(latency(one, field, key) for field in _FIELDS for key in _PARTS),
            one.of("extra", "request_estimate_ms"),
            by_model({name: own["mean"] for name, own in (one.record.window.get("wait_ms") or {}).items()}),
        )
        for one in group.windows
    ]
    last = ("whole answer, estimated", "waited for a launch, by model")
    return table((*_WINDOW, *(f"{figure}, ms" for figure in (*figures, *last))), rows, 4)


_FIELDS = {"ttft_ms": "first token", "gap_ms": "gap", "request_ms": "whole answer", "admission_ms": "admission"}
_PARTS = ("mean", "p50", "p95", "p99")


def rate(one: Measured) -> str:
    """Token/s, with the least and the most of several windows."""
    spread = one.spread
    return f"{cell(one.rate)} ({cell(spread[0])} to {cell(spread[1])})" if spread else cell(one.rate)


def latency(one: Measured, field: str, key: str) -> str | None:
    """A figure of a window's times, with a star where it is of the requests with which all streams began at once."""
    value = one.time_of(field, key)
    if value is None:
        return None
    return f"{cell(value)}{one.began_at_once if field == 'ttft_ms' else ''}"


def _window(group: Group, one: Measured) -> tuple[object, ...]:
    case = one.case
    return case.system, group.name(case.subject), case.workload, batching(one), case.streams
