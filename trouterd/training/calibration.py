"""Thresholds: for a share of the large model's tokens on text that the pair writes, or for a recall of labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trouterd.training.faults import TrainingError
from trouterd.training.pair import Pair
from trouterd.training.signal import Series, Signal, measure, share
from trouterd.training.writing import write, write_routed

ROUNDS = 3
"""Times that text is written anew with the threshold found on the last one."""
SHARES = (0.01, 0.02, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5)
"""Of a threshold table."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a threshold is chosen for; exactly one is set."""

    share: float | None = None
    """Of the tokens, by the large model, in 0..1."""
    recall: float | None = None
    """Of the positions that should go to the large model, in 0..1."""

    def __str__(self) -> str:
        return f"share {self.share:g}" if self.share is not None else f"recall {self.recall:g}"


def candidates(values: torch.Tensor) -> torch.Tensor:
    """Rising float32 thresholds (as routes compare them) that part the different values, and one on either side of all.

    Values at or above a threshold are parted from those below it.
    """
    levels = torch.unique(values.float(), sorted=True)
    if not len(levels):
        return torch.zeros(1)
    between = (levels[1:].double() + levels[:-1].double()).div(2).float()
    between = torch.where(between > levels[:-1], between, levels[1:])  # neighbours have nothing between them
    beyond = torch.nextafter(levels[-1:], torch.full((1,), torch.inf))
    return torch.cat((levels[:1], between, beyond))


def threshold_for_share(signal: Signal, series: Sequence[Series], target: float) -> float:
    """The threshold whose share on the given texts comes closest to the target.

    Raises:
        TrainingError: no text.
    """
    if not series:
        raise TrainingError("--prompts: none is left to calibrate on")
    values = [one.small[:1] if signal.once else one.small for one in series]
    if signal.large is not None:
        values += [one.large for one in series if one.large is not None]
    choices: list[float] = candidates(torch.cat(values)).tolist()
    if signal.rises:
        choices.reverse()  # from the lowest share up
    low, high = 0, len(choices) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if share(signal, series, choices[middle]) < target else (low, middle)
    near = choices[max(0, low - 1) : low + 1]
    return min(near, key=lambda choice: abs(share(signal, series, choice) - target))


def threshold_for_recall(values: torch.Tensor, positive: torch.Tensor, target: float, *, rises: bool) -> float:
    """The threshold that asks for the fewest rows among those that find the given part of the positive ones.

    Args:
        values: [N] the signal.
        positive: [N] bool.
        target: recall in 0..1.
        rises: see `Signal.rises`.

    Raises:
        TrainingError: no row is positive.
    """
    if not bool(positive.any()):
        raise TrainingError(
            "--min-recall: no position of the validation prompts should go to the large model; give more prompts"
        )
    ordered = values[positive].float().sort(descending=rises).values
    last = ordered[max(1, math.ceil(target * len(ordered))) - 1]
    choices = candidates(values)
    # The cut between the last positive that is needed and the next value on the far side of it.
    enough = choices[choices <= last] if rises else choices[choices > last]
    return float(enough.max() if rises else enough.min())


def calibrate(
    pair: Pair,
    signal: Signal,
    prompts: Sequence[Sequence[int]],
    target: float,
) -> tuple[float, list[Series]]:
    """The threshold for a share, and the signal along the text that it was found on.

    The text changes with the threshold: the pair writes it anew with each one that was found. It begins with the large
    model's answers.
    """
    answers = write(pair.large, prompts, pair.limit, pair.eos_ids)
    for number in range(ROUNDS):
        series = measure(pair, signal, prompts, answers)
        threshold = threshold_for_share(signal, series, target)
        if number < ROUNDS - 1:
            answers = [text.ids for text in write_routed(pair, prompts, signal.rule(threshold))]
    return threshold, series


def table(signal: Signal, series: Sequence[Series]) -> list[tuple[float, float]]:
    """(threshold, share) for round shares, on given texts."""
    thresholds = [threshold_for_share(signal, series, target) for target in SHARES]
    return [(threshold, share(signal, series, threshold)) for threshold in dict.fromkeys(thresholds)]
