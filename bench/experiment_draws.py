"""What a report says first, where routing decisions were drawn."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiment_case import STD
from bench.experiment_result import Result

DRAWN = "Routing decisions are drawn at the rates in the names: figures are for these rates, whatever a router of yours does."
_HEADS = "The algorithms' heads run beside them at every routed step, their answers unused, unless a note below says otherwise"
_STD = "with Std. Serving none runs"
_SCRIPTED = "No head runs beside them: a scripted model has no hidden states."
_BESIDE = "a scripted model has no hidden states, so that none runs beside it"


def drawn_line(results: Sequence[Result]) -> str:
    """One line; '' where nothing was drawn, or there is no window."""
    drawn = [result for result in results if _is_drawn(result)]
    if not drawn:
        return ""
    with_heads = [result.head.get("heads") is not False for result in drawn]
    if not any(with_heads):
        return f"{DRAWN} {_SCRIPTED}"
    std = any(record.case.system == STD for result in drawn for record in result.records)
    parts = [_HEADS, *([_BESIDE] if not all(with_heads) else []), *([_STD] if std else [])]
    return f"{DRAWN} {'; '.join(parts)}."


def _is_drawn(result: Result) -> bool:
    names = result.head.get("names") or {}
    return any(record.case.subject in names for record in result.records)
