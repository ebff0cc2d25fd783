"""What the four trainers have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from trouterd.training.fit import Fit, Schedule
from trouterd.training.judge import judge_named
from trouterd.training.options import TrainOptions
from trouterd.training.pair import Pair
from trouterd.training.prompts import Prompt
from trouterd.training.shards import Shards, Tensors
from trouterd.training.signal import Signal

Count = Callable[[int], None]
"""Hears of prompts (or continuations) that are done."""
Epoch = Callable[[int, float], None]
"""Hears of an epoch and its validation loss."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Rows of all prompts. `tensors["text"]` says which prompt a row belongs to; rows of one prompt are consecutive."""

    tensors: Tensors
    train: torch.Tensor
    """Row numbers by use."""
    validation: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def of(cls, tensors: Tensors, train: int, validation: int) -> Labels:
        """Rows of the first `train` prompts are to learn from, those of the next `validation` to stop by."""
        text = tensors["text"]
        first, second = (text < train), (text < train + validation)
        return cls(tensors, *(part.nonzero().flatten() for part in (first, second & ~first, ~second)))


@dataclass(frozen=True, slots=True)
class Learned:
    """What came out of a training."""

    pair: Pair
    """The models that the head is for."""
    labels: Labels
    head: Head
    fit: Fit
    threshold: float


class Head(Protocol):
    """A trained head."""

    signal: Signal

    def values(self, tensors: Tensors) -> torch.Tensor:
        """[N] the signal of labelled rows."""
        ...

    def save(self, path: Path, threshold: float, model: str) -> None:
        """Write the checkpoint in the algorithm's own format; `model` names the small model."""
        ...


class Trainer(Protocol):
    """How one algorithm gets labels and learns from them."""

    def arguments(self) -> dict[str, object]:
        """What the labels depend on besides models and prompts."""
        ...

    def collect(self, pair: Pair, prompts: Sequence[Prompt], shards: Shards, done: Count) -> Tensors:
        """The labels of all prompts."""
        ...

    def wanted(self, tensors: Tensors) -> torch.Tensor:
        """[N] bool: the rows that should go to the large model."""
        ...

    def fit(self, pair: Pair, labels: Labels, epoch: Epoch) -> tuple[Head, Fit]:
        """Train a head."""
        ...


class JudgedTrainer:
    """What trainers have in common whose labels a judge decides."""

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._judge = judge_named(options.judge)

    def arguments(self) -> dict[str, object]:
        """The judge."""
        return {"judge": self._options.judge}


def balance(target: torch.Tensor) -> torch.Tensor:
    """[] the weight at which the positive rows of [N] targets of 0 and 1 count as much as the others."""
    positive = target.sum().clamp(min=1)
    return (len(target) - positive) / positive


def schedule(options: TrainOptions, *, epochs: int, batch: int, rate: float, weight_decay: float) -> Schedule:
    """The algorithm's own schedule, less what the options say otherwise."""
    return Schedule(
        epochs=options.epochs or epochs,
        batch=options.batch or batch,
        rate=options.rate or rate,
        weight_decay=weight_decay,
        patience=options.patience,
        seed=options.pair.seed,
    )
