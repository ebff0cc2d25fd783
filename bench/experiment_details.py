"""Every window of an experiment with all of its figures, in Markdown."""

from __future__ import annotations

from bench.experiment_group import Group
from bench.experiment_markdown import batching, by_model, cell, percent, table


def details(group: Group) -> str:
    """Every window."""
    head = [
        *(
            "system",
            "asked",
            "workload",
            "B",
            "N",
            "token/s",
            "x large only",
            "x routed daemon's large",
            "of ideal",
            "predicted",
            "TTFT p50, ms",
        ),
        *("gap p50 / p99, ms", "request p50, ms", "hand-offs / 100", "GPU-s / 1,000", "large steps / 1,000"),
        *("batches", "steps, ms"),
    ]
    rows = [
        (
            one.case.system,
            group.name(one.case.subject),
            one.case.workload,
            batching(one),
            one.case.streams,
            one.rate,
            group.to_large(one),
            group.to_routed_large(one),
            percent(one.of_ideal),
            one.record.facts.get("predicted"),
            one.of("ttft_ms", "p50"),
            f"{cell(one.of('gap_ms', 'p50'))} / {cell(one.of('gap_ms', 'p99'))}",
            one.of("request_ms", "p50"),
            one.of("handoffs_per_100"),
            one.of("gpu_seconds_per_1000"),
            one.of("large_forwards_per_1000"),
            by_model(one.record.window.get("batch")),
            by_model(one.record.window.get("step_ms")),
        )
        for one in group.windows
    ]
    return table(head, rows, 4)
