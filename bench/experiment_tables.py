"""The tables of each experiment, in Markdown."""

from __future__ import annotations

from bench.experiment_case import EAGER, LARGE, PLANNED, SMALL, STD, TROUTERD
from bench.experiment_compared import system_name
from bench.experiment_fleet import SCALED
from bench.experiment_group import Group, Measured, Ratio, over
from bench.experiment_markdown import WAYS, batching, cell, table
from bench.experiment_rates import at_rates
from bench.experiment_time import visit_price


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
    return f"{cell(one.rate)} ({ratio})" if (ratio := over(one, whole)) else cell(one.rate)


def scaled_up(group: Group) -> str:
    """Experiment c: throughput and the speed of one user from 1 stream on; '' where the budget left the models alone."""
    head = (
        *("N", "large only", "in which way", "routed, fastest", "B", "x large only", "at nominal rates"),
        f"{group.device}-s x large only",
        *("learned B", "x large only", "Std. Serving", "x N = 1", "speed of one user kept", "large only keeps"),
    )
    if not group.subjects():
        return ""
    workload, subject = group.workloads()[0], group.subjects()[0]
    rows = []
    for count in group.streams(group.windows):
        one, large = group.best(workload, subject, count), group.fastest_large(workload, count)
        learned = group.learned(workload, subject, count)
        grown = over(one, group.best(workload, subject, 1))
        large_grown = over(large, group.fastest_large(workload, 1))
        ratio = group.to_large(one) if one else None
        std = group.select(system=STD, workload=workload, streams=count)
        rows.append(
            (
                count,
                large.rate if large else None,
                system_name(large.case.system) if large else None,
                one.rate if one else None,
                batching(one) if one else None,
                ratio,
                at_rates(group, one, ratio) if one else None,
                group.cost(one, "gpu_seconds_per_1000") if one else None,
                learned.rate if learned else None,
                group.to_large(learned) if learned else None,
                std[-1].rate if std else None,
                grown,
                _part(grown, count),
                _part(large_grown, count),
            )
        )
    return table(head, rows)


def _part(ratio: Ratio | None, of: float = 1) -> str | None:
    """As a percentage, with its mark."""
    return f"{ratio.value / of:.0%}{ratio.mark}" if ratio else None


def switched(group: Group) -> str:
    """Experiment d: every n-th token by the large model, and what a hand-off costs beside the two models' steps."""
    head = (
        "n",
        "N",
        "B",
        "token/s",
        "x large only",
        "hand-offs / 100",
        "price of a visit (two hand-offs), ms",
        "sent to first step, ms",
    )
    rows = [
        (
            one.case.subject.partition(":")[2],
            one.case.streams,
            batching(one),
            one.rate,
            group.to_large(one),
            one.of("handoffs_per_100"),
            visit_price(group, one),
            one.of("extra", "handoff_ms"),
        )
        for one in group.select()
        if one.case.subject not in (SMALL, LARGE)
    ]
    return table(head, rows)


def mistaken(group: Group) -> str:
    """Experiment e: token/s for wrong thresholds, against the planner's."""
    head = ("algorithm", "N", "B", "in force", "token/s", "x planned", "x large only", "predicted")
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
                        f"same as {same.removeprefix(PLANNED).strip() or 'planned'}"
                        if (same := one.same_as)
                        else one.rate,
                        None if one.same_as else over(one, right),
                        group.to_large(one),
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
                _part(over(other, one)),
            )
        )
    return table(head, rows, 1)


def _like(group: Group, one: Measured, workload: str) -> list[Measured]:
    case = one.case
    return group.select(
        system=case.system, workload=workload, subject=case.subject, batching=case.batching, streams=case.streams
    )
