"""Which steps are captured as CUDA graphs, by their rows."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, int]
"""Token rows and logit rows of a captured step."""


class Shapes:
    """Shapes that are captured.

    Args:
        buckets: token rows, rising.
        extends: also those of steps with more token rows than logit rows.
    """

    def __init__(self, buckets: Sequence[int], *, extends: bool) -> None:
        decodes = zip(buckets, buckets, strict=True)
        # For extends about a quarter of the token rows want logits.
        fewer = ((total, next(b for b in buckets if 4 * b >= total)) for total in buckets)
        self.all: tuple[Shape, ...] = tuple(sorted({*decodes, *(fewer if extends else ())}, reverse=True))
        """Largest first."""
        self._extends = extends

    def of(self, total: int, wanted: int) -> Shape:
        """The smallest captured shape that holds so many token rows and logit rows, (0, 0) when there is none."""
        if total > wanted and not self._extends:
            return 0, 0
        return next((s for s in reversed(self.all) if s[0] >= total and s[1] >= wanted), (0, 0))
