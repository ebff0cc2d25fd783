"""Steps of two models beside each other, and the table of what they took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """Steps of both models, ms; alone, and beside each other."""

    percent: int
    small: str
    large: str
    small_alone: float
    small_beside: float
    large_alone: float
    large_beside: float

    @property
    def contention(self) -> tuple[float, float]:
        """By how much a step of either is longer beside the other."""
        return self.small_beside / self.small_alone - 1, self.large_beside / self.large_alone - 1

    @property
    def together(self) -> float:
        """Work of both in a second, by what each does alone in a second."""
        return self.small_alone / self.small_beside + self.large_alone / self.large_beside


def table(pairs: Sequence[Pair]) -> str:
    """Of all pairs, and the contention of each percentage."""
    lines = [
        "| percent | small | large | small alone, ms | beside | large alone, ms | beside | contention | together |",
        "|---:|---|---|---:|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {pair.percent} | {pair.small} | {pair.large} | {pair.small_alone:.3f} | {pair.small_beside:.3f}"
        f" | {pair.large_alone:.2f} | {pair.large_beside:.2f} | {_factors([pair])} | {pair.together:.2f} |"
        for pair in pairs
    ]
    lines += ["", "Medians:", ""]
    for percent in dict.fromkeys(pair.percent for pair in pairs):
        own = [pair for pair in pairs if pair.percent == percent]
        together = statistics.median(pair.together for pair in own)
        lines.append(f"- {percent} %: --contention {_factors(own)}, together {together:.2f}")
    return "\n".join(lines)


def _factors(pairs: Sequence[Pair]) -> str:
    """As `--contention` takes them, which knows no negative ones."""
    columns = zip(*(pair.contention for pair in pairs), strict=True)
    return ",".join(f"{max(0.0, statistics.median(column)):.2f}" for column in columns)
