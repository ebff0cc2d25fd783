"""Several windows of the same thing, with other draws, as one: what differs between them is the spread of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from statistics import fmean
from typing import Any

from bench.window import Repeat, Window

_COUNTS = frozenset(("requests", "count", "steps"))
"""Fields that count something of a window; all other numbers are means."""
_SHORT, _OF = "short_answers", "ttft_of"


def merged(windows: Sequence[Window]) -> Window:
    """Field by field: counts are summed up, and other numbers are means of the windows that have them. Times to the first token are
    those of windows in which requests began, if there are such.

    Args:
        windows: one or more, of the same system, workload and number of streams, and of the same length.
    """
    first, *others = windows
    if not others:
        return first
    both = {one.name: _merged([getattr(window, one.name) for window in windows], one.name) for one in fields(Window)}
    short = {_SHORT: sum(float(window.extra.get(_SHORT, 0)) for window in windows)} if _SHORT in both["extra"] else {}
    during = [window for window in windows if _OF not in window.extra]
    if during:
        both["ttft_ms"] = _merged([window.ttft_ms for window in during], "ttft_ms")
        both["extra"].pop(_OF, None)
    return replace(
        first,
        **{name: value for name, value in both.items() if name not in ("streams", "seed", "extra", "repeats")},
        extra=both["extra"] | short,
        repeats=[Repeat(one.seed, one.tokens_per_second, one.handed) for one in windows],
    )


def spread(window: Window) -> tuple[float, float] | None:
    """Lowest and highest token/s of its repeats; None: it has none."""
    rates = [repeat.tokens_per_second for repeat in window.repeats]
    return (min(rates), max(rates)) if rates else None


def _merged(values: Sequence[Any], name: str = "") -> Any:
    """One value of a field, or of an entry, which has no name."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    first = known[0]
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{one.name: _merged([getattr(value, one.name) for value in known], one.name) for one in fields(first)}
        )
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in known for key in value)
        return {key: _merged([value.get(key) for value in known]) for key in keys}
    if isinstance(first, int | float):
        return sum(known) if name in _COUNTS else fmean(known)
    return first
