"""What a head or a threshold does on prompts that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from rich.table import Table

from trouterd.training.calibration import candidates
from trouterd.training.judge import is_right, judge_named
from trouterd.training.pair import Pair
from trouterd.training.prompts import Prompt
from trouterd.training.signal import Signal, written_share
from trouterd.training.writing import Rule, Written, write, write_routed

POINTS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Shares of labelled rows that a curve shows."""


class Point(msgspec.Struct, frozen=True):
    """A threshold on labelled rows; all parts in 0..1."""

    threshold: float
    share: float
    """Of the rows, that go to the large model."""
    recall: float
    """Of the rows that should, those that do."""
    accuracy: float
    """Of the rows, those whose decision is the label's."""


class Routed(msgspec.Struct, frozen=True):
    """Held-out prompts, answered; all parts in 0..1."""

    prompts: int
    share: float
    """Of the tokens, by the large model."""
    right: float
    small_right: float
    large_right: float


class LabelCounts(msgspec.Struct, frozen=True):
    """Labelled rows by use, and the part of them that should go to the large model."""

    train: int
    validation: int
    held_out: int
    wanted: float


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Rows with a signal and what it should say."""

    values: torch.Tensor
    """[N]"""
    wanted: torch.Tensor
    """[N] bool"""

    def point(self, signal: Signal, threshold: float) -> Point:
        """What a threshold does on them."""
        asked = signal.asks(self.values, threshold)
        found = (asked & self.wanted).sum() / self.wanted.sum().clamp(min=1)
        return Point(threshold, _mean(asked), float(found), _mean(asked == self.wanted))

    def curve(self, signal: Signal, threshold: float) -> list[Point]:
        """Points at round shares and at the threshold itself, by share."""
        choices = candidates(self.values)
        if signal.rises:
            choices = choices.flip(0)
        places = [min(len(choices) - 1, round(share * (len(choices) - 1))) for share in POINTS]
        thresholds = {*choices[places].tolist(), threshold} if len(self.values) else {threshold}
        return sorted((self.point(signal, one) for one in thresholds), key=lambda point: point.share)


def answer_held_out(pair: Pair, prompts: Sequence[Prompt], rule: Rule, judge: str) -> tuple[Routed, list[Written]]:
    """Answer prompts by the rule and by either model alone. Without a known answer the large model's counts as right."""
    ids = [prompt.ids for prompt in prompts]
    routed = write_routed(pair, ids, rule)
    small, large = (write(reader, ids, pair.limit, pair.eos_ids) for reader in (pair.small, pair.large))
    same = judge_named("text" if judge == "text" else "answer")

    def right(answers: Sequence[Sequence[int]]) -> float:
        good = 0
        for prompt, answer, reference in zip(prompts, answers, large, strict=True):
            text = pair.text(answer)
            good += is_right(text, prompt.answer) if prompt.answer is not None else same(text, pair.text(reference))
        return good / max(1, len(prompts))

    result = Routed(len(prompts), written_share(routed), right([one.ids for one in routed]), right(small), right(large))
    return result, routed


def curve_table(points: Sequence[Point], threshold: float) -> Table:
    """The curve; the row of the threshold in force is marked."""
    table = Table(title="labels of held-out prompts")
    for heading in ("threshold", "to the large model", "recall", "labels met"):
        table.add_column(heading, justify="right")
    for point in points:
        mark = "* " if point.threshold == threshold else ""
        table.add_row(
            f"{mark}{point.threshold:.6g}", f"{point.share:.1%}", f"{point.recall:.1%}", f"{point.accuracy:.1%}"
        )
    return table


def share_table(points: Sequence[tuple[float, float]]) -> Table:
    """Thresholds and the shares that they make."""
    table = Table(title="on text that the pair wrote")
    for heading in ("threshold", "tokens by the large model"):
        table.add_column(heading, justify="right")
    for threshold, share in points:
        table.add_row(f"{threshold:.6g}", f"{share:.1%}")
    return table


def routed_table(routed: Routed, known: bool) -> Table:
    """The route between the two models alone; `known`: the prompts came with their answers."""
    table = Table(title=f"{routed.prompts} held-out prompts, answered")
    for heading in ("", "right" if known else "as the large model", "tokens by the large model"):
        table.add_column(heading, justify="right")
    table.add_row("small alone", f"{routed.small_right:.1%}", "0.0%")
    table.add_row("routed", f"{routed.right:.1%}", f"{routed.share:.1%}")
    table.add_row("large alone", f"{routed.large_right:.1%}", "100.0%")
    return table


def _mean(flags: torch.Tensor) -> float:
    return float(flags.float().mean()) if len(flags) else 0.0
