"""The training loop of all heads: AdamW on shuffled rows, early stop, and the weights of the epoch that was really best."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

Loss = Callable[[torch.Tensor], torch.Tensor]
"""[B] row numbers -> mean loss over these rows."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast a head learns."""

    epochs: int
    batch: int
    rate: float
    """Of AdamW; falls linearly to zero over the epochs."""
    weight_decay: float
    patience: int
    """Epochs without a better validation loss after which training ends."""
    seed: int


@dataclass(frozen=True, slots=True)
class Fit:
    """How it went."""

    epochs: int
    best_epoch: int
    """From 1; 0: no epoch was better than the untrained head."""
    train_loss: float
    """Mean over the best epoch."""
    validation_loss: float
    """Of the weights that were kept."""


def fit(
    head: torch.nn.Module,
    loss: Loss,
    train: torch.Tensor,
    validation: torch.Tensor,
    schedule: Schedule,
    progress: Callable[[int, float], None],
) -> Fit:
    """Train `head` in place; it ends with the weights of its best epoch, in evaluation mode.

    Args:
        head: the module that `loss` calls.
        loss: of rows.
        train: [N] row numbers to learn from.
        validation: [M] row numbers that choose the epoch.
        schedule: rates and lengths.
        progress: hears of each epoch and its validation loss.
    """
    torch.manual_seed(schedule.seed)  # dropout
    order = torch.Generator().manual_seed(schedule.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=schedule.rate, weight_decay=schedule.weight_decay)
    best = _evaluate(head, loss, validation, schedule.batch)
    kept, best_epoch, best_train, epoch = copy.deepcopy(head.state_dict()), 0, float("nan"), 0
    for epoch in range(1, schedule.epochs + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * (1 - (epoch - 1) / schedule.epochs)
        head.train()
        total = 0.0
        shuffled = train[torch.randperm(len(train), generator=order)]
        for rows in torch.split(shuffled, schedule.batch):
            if len(rows) < 2 and len(shuffled) > 1:
                continue  # batch statistics of one row say nothing
            value = loss(rows)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += value.item() * len(rows)
        reached = _evaluate(head, loss, validation, schedule.batch)
        progress(epoch, reached)
        if reached < best:
            kept, best, best_epoch = copy.deepcopy(head.state_dict()), reached, epoch
            best_train = total / len(train)
        if epoch - best_epoch >= schedule.patience:
            break
    head.load_state_dict(kept)
    head.eval()
    return Fit(epoch, best_epoch, best_train, best)


@torch.no_grad()
def _evaluate(head: torch.nn.Module, loss: Loss, rows: torch.Tensor, batch: int) -> float:
    head.eval()
    total = sum(float(loss(piece)) * len(piece) for piece in torch.split(rows, batch))
    return total / max(1, len(rows))
