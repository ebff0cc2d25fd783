"""The tables of each experiment, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.experiment_case import LARGE, SMALL, STD, TROUTERD
from bench.experiment_fleet import AUTO, EAGER, PLANNED, SCALED
from bench.experiment_group import Group, Measured, Ratio
from bench.experiment_markdown import WAYS, batching, by_model, cell, percent, table
from bench.experiment_time import handoff_price


def compared(group: Group) -> str:
    """Experiment a: token/s of every algorithm against the large model alone and against Std. Serving."""
    parts = []
    for workload in group.workloads():
        counts = group.streams(group.select(workload=workload))
        head = ["algorithm", "", *(f"N = {count}" for count in counts)]
        rows: list[Sequence[object]] = []
        for subject in group.subjects():
            for what, ratio in (("x large only", group.ratio), ("x Std. Serving", group.to_std)):
                rows += _ratios(group, workload, subject, counts, what, ratio)
            std = [group.select(system=STD, workload=workload, subject=subject, streams=count) for count in counts]
            if any(std):
                cells = [group.ratio(found[0]) if found else None for found in std]
                rows.append((group.name(subject), "Std. Serving x large only", *cells))
        parts.append(f"Workload `{workload}`: token/s against others\n\n{table(head, rows, 2)}")
    return "\n".join(parts)


def _ratios(
    group: Group,
    workload: str,
    subject: str,
    counts: Sequence[int],
    what: str,
    ratio: Callable[[Measured], Ratio | None],
) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for way in (PLANNED, AUTO, EAGER):
        found = {one.case.streams: one for one in group.select(workload=workload, subject=subject, batching=way)}
        if way != PLANNED and found:
            # One stream alone never waits: that window stands for all ways.
            found |= {one.case.streams: one for one in group.select(workload=workload, subject=subject, streams=1)}
        cells = [ratio(found[count]) if count in found else None for count in counts]
        if any(cells):
            rows.append((group.name(subject), f"{WAYS[way]}, {what}", *cells))
    return rows


def details(group: Group) -> str:
    """Every window."""
    head = [
        *("system", "asked", "workload", "B", "N", "token/s", "x large", "of ideal", "predicted", "TTFT p50, ms"),
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
            group.ratio(one),
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


def ablated(group: Group) -> str:
    """Experiment b: token/s with one part off, and its share of the whole."""
    routed = [one for one in group.windows if one.case.subject in group.names]
    counts = group.streams(routed)
    ways: dict[tuple[str, str], dict[int, Measured]] = {}
    for one in routed:
        ways.setdefault((one.case.system, one.case.batching), {})[one.case.streams] = one
    full = ways.get((TROUTERD, PLANNED), {})
    rows = [
        (system, WAYS.get(way, way), *(_share(found.get(count), full.get(count)) for count in counts))
        for (system, way), found in ways.items()
    ]
    return table(["", "B", *(f"N = {count}" for count in counts)], rows, 2)


def _share(one: Measured | None, whole: Measured | None) -> str | None:
    if one is None:
        return None
    return f"{cell(one.rate)} ({one.rate / whole.rate:.2f})" if whole and whole.rate else cell(one.rate)


def scaled_up(group: Group) -> str:
    """Experiment c: throughput and the speed of one user from 1 stream on."""
    head = ("N", "large only", "routed", "B", "x large", "Std. Serving", "x N = 1", "speed of one user kept", "large's")
    (workload, *_), (subject, *_) = group.workloads(), group.subjects()
    rows = []
    for count in group.streams(group.windows):
        one, first = group.best(workload, subject, count), group.best(workload, subject, 1)
        grown = _over(one, first)
        large = group.best(workload, LARGE, count)
        large_grown = _over(large, group.best(workload, LARGE, 1))
        std = group.select(system=STD, workload=workload, streams=count)
        rows.append(
            (
                count,
                large.rate if large else None,
                one.rate if one else None,
                batching(one) if one else None,
                group.ratio(one) if one else None,
                std[-1].rate if std else None,
                grown,
                percent(grown / count if grown else None),
                percent(large_grown / count if large_grown else None),
            )
        )
    return table(head, rows)


def _over(one: Measured | None, other: Measured | None) -> float | None:
    return one.rate / other.rate if one and other and other.rate else None


def switched(group: Group) -> str:
    """Experiment d: every n-th token by the large model, and what a hand-off costs beside the two models' steps."""
    head = (
        "n",
        "N",
        "B",
        "token/s",
        "x large",
        "hand-offs / 100",
        "price of a hand-off, ms",
        "sent to first step, ms",
    )
    rows = [
        (
            one.case.subject.partition(":")[2],
            one.case.streams,
            batching(one),
            one.rate,
            group.ratio(one),
            one.of("handoffs_per_100"),
            handoff_price(group, one),
            one.of("extra", "handoff_ms"),
        )
        for one in group.select()
        if one.case.subject not in (SMALL, LARGE)
    ]
    return table(head, rows)


def mistaken(group: Group) -> str:
    """Experiment e: token/s for wrong thresholds, against the planner's."""
    head = ("algorithm", "N", "B", "in force", "token/s", "x planned", "x large", "predicted")
    rows = []
    for subject in group.subjects():
        for count in group.streams(group.select(subject=subject)):
            found = group.select(subject=subject, streams=count)
            right = next((one for one in found if one.case.batching == PLANNED), None)
            for one in sorted(found, key=lambda one: factor(one.case.batching)):
                thresholds = one.record.facts.get("thresholds") or {}
                rows.append(
                    (
                        group.name(subject),
                        count,
                        one.case.batching.removeprefix(PLANNED).strip() or "planned",
                        ", ".join(str(value) for value in thresholds.values()),
                        one.rate,
                        f"{one.rate / right.rate:.2f}" if right and right.rate else None,
                        group.ratio(one),
                        one.record.facts.get("predicted"),
                    )
                )
    return table(head, rows, 1)


def factor(way: str) -> float:
    """By which thresholds are wrong; 0 for none at all."""
    if way == EAGER:
        return 0.0
    return float(way.removeprefix(SCALED)) if way.startswith(SCALED) else 1.0


def lengthened(group: Group) -> str:
    """Experiment g: token/s with long answers against short ones."""
    short, long = (group.workloads() * 2)[:2]
    head = ("", "N", f"`{short}`", f"`{long}`", "kept")
    rows = []
    for one in group.windows:
        if one.case.workload != short:
            continue
        other = next(iter(_like(group, one, long)), None)
        label = f"{one.case.system}, {group.name(one.case.subject)}"
        way = WAYS.get(one.case.batching, one.case.batching)
        rows.append(
            (
                f"{label}, {way}" if way else label,
                one.case.streams,
                one.rate,
                other.rate if other else None,
                percent(other.rate / one.rate if other and one.rate else None),
            )
        )
    return table(head, rows, 1)


def _like(group: Group, one: Measured, workload: str) -> list[Measured]:
    case = one.case
    return group.select(
        system=case.system, workload=workload, subject=case.subject, batching=case.batching, streams=case.streams
    )
