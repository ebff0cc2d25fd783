"""How far a measurement is: a bar where a terminal shows it, a line for each part elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

_WIDTH = 30


class Progress:
    """Of a number of equal parts.

    Args:
        parts: how many there are.
        stream: where it is shown; None: standard error.
    """

    def __init__(self, parts: int, stream: TextIO | None = None) -> None:
        self._parts = parts
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._done = 0
        self._shown = 0
        """Characters of the line on the terminal."""

    def show(self, title: str, part: float) -> None:
        """The present one, of which this part (0 to 1) is done. Terminals only."""
        if self._live:
            whole = (self._done + part) / self._parts
            filled = round(whole * _WIDTH)
            self._line(f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {self._done + 1}/{self._parts} {title}: {part:.0%}")

    def done(self, text: str, parts: int = 1) -> None:
        """The present one is, or so many at once; what came of it."""
        self._done += parts
        self._line(f"[{self._done}/{self._parts}] {text}")
        self._stream.write("\n")
        self._stream.flush()
        self._shown = 0

    def _line(self, text: str) -> None:
        if self._live:
            self._stream.write("\r" + text.ljust(self._shown))
            self._stream.flush()
            self._shown = len(text)
        else:
            self._stream.write(text)
