"""Several windows of the same thing, with other draws, as one: what differs between them is the spread of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import msgspec

from bench.window import Repeat, Window

_SUMS = frozenset(("requests", "short_answers", "count"))
"""Fields that count; all other numbers are means."""


def merged(windows: Sequence[Window]) -> Window:
    """Field by field: counts are summed up, and other numbers are means of the windows that have them.

    Args:
        windows: one or more, of the same system, workload and number of streams, and of the same length.
    """
    if len(windows) == 1:
        return windows[0]
    fields = _merged([asdict(window) for window in windows])
    fields |= {"streams": windows[0].streams, "seed": windows[0].seed}
    fields["repeats"] = [Repeat(one.seed, one.tokens_per_second, one.handed) for one in windows]
    return msgspec.convert(fields, Window, from_attributes=True)


def spread(window: Window) -> tuple[float, float] | None:
    """Lowest and highest token/s of its repeats; None: it has none."""
    rates = [repeat.tokens_per_second for repeat in window.repeats]
    return (min(rates), max(rates)) if rates else None


def _merged(all_of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for one in all_of for name in one)
    return {name: _one(name, [one[name] for one in all_of if one.get(name) is not None]) for name in names}


def _one(name: str, values: Sequence[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], Mapping):
        return _merged(values)
    if name in _SUMS:
        return sum(values)
    return fmean(values) if isinstance(values[0], int | float) else values[0]
