"""The tables of experiment a, in Markdown: algorithms against the large model without routing and against Std. Serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.experiment_case import AUTO, EAGER, ITSELF, LARGE, PLANNED, STD, TROUTERD
from bench.experiment_group import Group, Measured
from bench.experiment_markdown import WAYS, table
from bench.experiment_rates import at_rates, rates
from trouterd.batching.placement import SHARED

_SYSTEMS = {TROUTERD: "in the routed daemon"}
"""For tables; the others are called as they are."""
_ROUTED_ONLY = "The large model was not measured by itself here: *large only* is that of the daemon that routes"
_HANDICAPPED = ", where the small model has the persistent kernel of their GPU. By itself it can be faster"


def compared(group: Group) -> str:
    """Token/s of the large model without routing, and what the others have of that, and cost."""
    parts = []
    for workload in group.workloads():
        counts = group.streams(group.select(workload=workload))
        if text := baselines(group, workload, counts):
            parts.append(f"Workload `{workload}`: the large model without routing, token/s\n\n{text}")
        for title, shown in _comparisons(group).items():
            if text := _table(group, workload, counts, shown):
                parts.append(f"Workload `{workload}`: {title}\n\n{text}")
    return "\n".join(parts)


_Shown = Callable[[Measured], object]
"""A cell for a window; None: nothing."""


def _comparisons(group: Group) -> dict[str, _Shown]:
    """By title."""
    found: dict[str, _Shown] = {
        "token/s x the fastest large only": group.to_large,
        "token/s x the fastest large only, had the draws met their rates": lambda one: _at_rate(group, one),
    }
    if len(group.large_systems) > 1:
        found["token/s x the large model of the routed daemon"] = group.to_routed_large
    found["token/s x Std. Serving"] = lambda one: None if one.case.system == STD else group.to_std(one)
    cost = f"what a token costs, x the fastest large only: {group.device}-seconds / forward passes of the large model"
    return found | {cost: lambda one: _cost(group, one)}


def baselines(group: Group, workload: str, counts: Sequence[int]) -> str:
    """A row for each way to serve the large model alone, and which is the fastest; with a remark where one is missing.

    Nothing where there is nothing to compare with it, at no number of streams.
    """
    rows: list[Sequence[object]] = []
    fastest: dict[int, str] = {}
    for system in group.large_systems:
        found = {one.case.streams: one for one in group.select(system=system, workload=workload, subject=LARGE)}
        rows.append((system_name(system), *(one.rate if (one := found.get(count)) else None for count in counts)))
        fastest |= {
            count: system_name(best.case.system) for count, one in found.items() if (best := group.best_large(one))
        }
    if not rows or not counts:
        return ""
    if len(rows) > 1:
        rows.append(("the fastest: *large only*", *(fastest.get(count) for count in counts)))
    text = table(["", *(f"N = {count}" for count in counts)], rows)
    if any(system.startswith(ITSELF) for system in group.large_systems):
        return text
    return f"{text}\n{_ROUTED_ONLY}{_HANDICAPPED if group.head['placement'] == SHARED else ''}.\n"


def system_name(system: str) -> str:
    """Of a way to serve the large model alone."""
    return _SYSTEMS.get(system, system)


def _table(group: Group, workload: str, counts: Sequence[int], shown: _Shown) -> str:
    """A row for every algorithm and every way to serve it."""
    rows: list[Sequence[object]] = []
    for subject in group.subjects():
        for way, found in _ways(group, workload, subject).items():
            cells = [shown(found[count]) if count in found else None for count in counts]
            if any(cells):
                rows.append((group.name(subject), way, *cells))
    return table(["algorithm", "B", *(f"N = {count}" for count in counts)], rows, 2)


def _at_rate(group: Group, one: Measured) -> str | None:
    ratio = at_rates(group, one, group.to_large(one))
    return f"{ratio} ({rates(one)})" if ratio else None


def _cost(group: Group, one: Measured) -> str | None:
    gpus, forwards = group.cost(one, "gpu_seconds_per_1000"), group.cost(one, "large_forwards_per_1000")
    return f"{gpus or '-'} / {forwards or '-'}" if gpus or forwards else None


def _ways(group: Group, workload: str, subject: str) -> dict[str, dict[int, Measured]]:
    """Windows by streams, of every way to serve an algorithm."""
    ways: dict[str, dict[int, Measured]] = {}
    for way in (PLANNED, AUTO, EAGER):
        found = {one.case.streams: one for one in group.select(workload=workload, subject=subject, batching=way)}
        if way != PLANNED and found:
            # One stream alone never waits: that window stands for all ways.
            found |= {one.case.streams: one for one in group.select(workload=workload, subject=subject, streams=1)}
        ways[WAYS[way]] = found
    std = group.select(system=STD, workload=workload, subject=subject)
    return ways | {"Std. Serving": {one.case.streams: one for one in std}}
