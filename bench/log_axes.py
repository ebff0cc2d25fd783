"""Logarithmic axes that read 1, 2, 5, 10 instead of powers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axis import Axis

_USUAL = (1.0, 2.0, 5.0)
_CLOSE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_WIDE = 5.0
"""Of an axis from 1 to this and less, the usual numbers would be too few."""


def plain_numbers(axis: Axis) -> None:
    """For an axis with the base 10, when everything has been drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, subs=_USUAL if high / low > _WIDE else _CLOSE))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_locator(NullLocator())


def plain(value: float) -> str:
    """`0.05`, `2`, `20,000`."""
    return f"{value:,.6g}" if value < 1e3 else f"{value:,.0f}"
