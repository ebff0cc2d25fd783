"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterable[str]:
    """Lines of columns as wide as their widest cell."""
    cells = [list(map(cell, row)) for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip()


def cell(value: Any) -> str:
    """Of one value; numbers have no more digits than they are known to."""
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    return f"{value:z.{0 if size >= 100 else 1 if size >= 10 else 3}f}"
