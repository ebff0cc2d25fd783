"""Sizes of steps, as command lines name them: REQUESTSxROWS."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step's requests, and the rows of each."""

    requests: int
    rows: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.rows}"


def step_sizes(text: str) -> tuple[StepSize, ...]:
    """An option that is a list of REQUESTSxROWS."""
    found = []
    for part in text.split(","):
        requests, _, rows = part.partition("x")
        if not (requests.isdecimal() and rows.isdecimal() and int(requests) and int(rows)):
            raise argparse.ArgumentTypeError(f"expected REQUESTSxROWS with commas between, got {text!r}")
        found.append(StepSize(int(requests), int(rows)))
    return tuple(found)
