"""Which steps are captured as CUDA graphs, by their rows."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, int]
"""Token rows and logit rows of a captured step."""
NO_SHAPE: Shape = 0, 0
"""Of a step that is not captured."""
DECODE_ROWS = 256
"""Token rows up to which all of them may want logits: those of 512 rows of 151,669 ids would take 310 MB."""
_LONG_EXTEND_LOGITS = 128
"""Logit rows of the extends beyond."""
_HALVED_ROWS = 96
"""Token rows from which on logits that nobody asked for cost more than another graph: 64 visits of 3 rows want 64 of 192."""


class Shapes:
    """Shapes that are captured.

    Args:
        buckets: token rows, rising.
        extends: also those of steps with more token rows than logit rows.
    """

    def __init__(self, buckets: Sequence[int], *, extends: bool) -> None:
        short = [total for total in buckets if total <= DECODE_ROWS]

        def part(total: int, share: int) -> Shape:
            return total, next(b for b in short if share * b >= total)

        shapes = {(total, total) for total in short}
        if extends:
            # About a quarter of the token rows of an extend want logits.
            shapes |= {part(total, 4) for total in short}
            shapes |= {part(total, 2) for total in short if total >= _HALVED_ROWS}
            shapes |= {(total, _LONG_EXTEND_LOGITS) for total in buckets if total > DECODE_ROWS}
        self.all: tuple[Shape, ...] = tuple(sorted(shapes, reverse=True))
        """Largest first."""
        self._extends = extends

    @property
    def most(self) -> Shape:
        """The most token rows, and the most logit rows, of any shape."""
        return max(total for total, _ in self.all), max(wanted for _, wanted in self.all)

    def of(self, total: int, wanted: int) -> Shape:
        """The smallest captured shape that holds so many token rows and logit rows, `NO_SHAPE` when there is none."""
        if total > wanted and not self._extends:
            return NO_SHAPE
        return next((s for s in reversed(self.all) if s[0] >= total and s[1] >= wanted), NO_SHAPE)
