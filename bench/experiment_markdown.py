"""Cells and tables of a report of experiments, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.experiment_case import AUTO, EAGER, PLANNED
from bench.experiment_group import Measured

WAYS = {PLANNED: "planned B", AUTO: "learned B", EAGER: "eager", "": ""}
"""Of delayed batching, for tables."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """In Markdown; the first `words` columns are text, the others numbers. An empty string without rows."""
    lines = [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
    if not lines:
        return ""
    rule = "|" + "---|" * words + "---:|" * (len(head) - words)
    return "\n".join([f"| {' | '.join(head)} |", rule, *lines]) + "\n"


def cell(value: object) -> str:
    """Of a table; a float has the digits that it deserves, None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def percent(value: float | None) -> str | None:
    """Of a share."""
    return None if value is None else f"{value:.0%}"


def batching(one: Measured) -> str:
    """How it waits, and the thresholds that were in force."""
    way = one.case.batching.replace(PLANNED, WAYS[PLANNED])
    way = WAYS.get(one.case.batching, way)
    thresholds = one.record.facts.get("thresholds") or {}
    listed = ", ".join(str(value) for value in thresholds.values())
    return f"{way} ({listed})" if way and way != WAYS[EAGER] and listed else way


def by_model(values: object) -> str:
    """A window's figures of each model."""
    return ", ".join(cell(float(value)) for value in values.values()) if isinstance(values, dict) and values else "-"
