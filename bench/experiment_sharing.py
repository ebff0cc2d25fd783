"""The tables of experiment f: ways to share a card, and what the models do to each other with each of them."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiment_case import LARGE, MIDDLE, SMALL, TROUTERD
from bench.experiment_contention import Fit
from bench.experiment_details import latency
from bench.experiment_group import Group, Measured
from bench.experiment_markdown import batching, by_model, cell, percent, table
from bench.experiment_steps import StepTimes, mean_step
from bench.experiment_time import alone_ms
from bench.patterns import ME, PATTERNS

_AS_IT_IS = "as it is"


def placed(group: Group) -> str:
    """Throughput, steps alone and beside the other model, and the tail of the gaps; then contention."""
    head = (
        *(
            "",
            "asked",
            "B",
            "N",
            "token/s",
            "x routed daemon's large",
            "small step alone, ms",
            "here",
            "large step alone, ms",
            "here",
        ),
        *("beside the other: small", "large", "TTFT p99, ms", "gap p50, ms", "gap p99, ms", "busy"),
    )
    routed = [one for one in group.windows if one.case.subject in group.names]
    order = list(dict.fromkeys(one.case.system for one in group.windows))
    rows = [
        (
            _way(one.case.system),
            group.name(one.case.subject),
            batching(one),
            one.case.streams,
            one.rate,
            group.to_routed_large(one),
            *_steps(group, one, SMALL),
            *_steps(group, one, LARGE),
            percent(_beside(one, SMALL)),
            percent(_beside(one, LARGE)),
            latency(one, "ttft_ms", "p99"),
            one.of("gap_ms", "p50"),
            one.of("gap_ms", "p99"),
            by_model(one.record.window.get("busy")),
        )
        for one in sorted(routed, key=lambda one: (one.case.subject, one.case.streams, order.index(one.case.system)))
    ]
    parts = [table(head, rows, 3)]
    parts += [_contention(group, workload, subject) for workload in group.workloads() for subject in group.subjects()]
    return "\n".join(part for part in parts if part)


def _way(system: str) -> str:
    return _AS_IT_IS if system == TROUTERD else system


def _steps(group: Group, one: Measured, name: str) -> tuple[float | None, float | None]:
    """Milliseconds, alone and in the window."""
    step = mean_step(one.record.window, name)
    return alone_ms(group, one, name), step[1] if step else None


def _beside(one: Measured, name: str) -> float | None:
    """Part of the model's steps for which the other one ran."""
    own = (one.record.window.get("overlap") or {}).get(name)
    return own["overlap_ms"] / own["step_ms"] if own else None


def _contention(group: Group, workload: str, subject: str) -> str:
    """By least squares over windows; '' where none says for how long models ran side by side."""
    steps = StepTimes()
    for one in group.windows:
        steps.learn(one.case, one.record.window)
    names = (SMALL, LARGE) if len(group.head["devices"]) == 2 else (SMALL, MIDDLE, LARGE)
    pattern = next((one for one in (*PATTERNS, ME) if one.key == subject), None)
    if pattern is None:
        return ""
    fit = steps.fit(workload, pattern, names)
    head = ("", *(f"{name}: longer by, ms per ms" for name in names), "as `--contention`", "windows")
    text = table(head, _slopes(fit, names))
    if not text:
        return ""
    told = f"What a step of {group.name(subject)} takes longer for each millisecond that the other model runs beside it"
    more = ", ".join(f"{cell(round(cost, 4))} ms ({name})" for name, cost in fit.more.items())
    return f"{told}, by least squares. Hand-offs, with the rows of visits, add to a step for each request: {more}.\n\n{text}"


def _slopes(fit: Fit, names: Sequence[str]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for system in dict.fromkeys(system for system, _ in fit.slopes):
        found = [fit.slopes.get((system, name)) for name in names]
        factors = fit.factors(system, names)
        told = None if factors is None else ",".join(f"{factor:.2g}" for factor in factors)
        windows = max(slope.windows for slope in found if slope is not None)
        rows.append((_way(system), *(slope.value if slope else None for slope in found), told, windows))
    return rows
