"""A small model and its deferral row learn together, as Co-LLM does it (arXiv 2403.03870).

The row is one more, last row of the LM head: with d its logit, P = sigmoid(d) and p_small the law of the other rows, the loss of a
token x is -log[(1 - P) p_small(x) + P p_large(x)]. The small model is transformers' own; the large one has been read before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from trouterd.training.faults import TrainingError
from trouterd.training.fit import Fit, Schedule
from trouterd.training.shards import ids_digest

WARM_UP = 0.04
"""Part of the steps in which the learning rate rises."""
MISTAKE_WEIGHT = 5.0
"""Of the search's places that the small model gets wrong, as in the official code."""
PADDED_TOKENS = 8192
"""Of one forward pass, the padding of short texts included."""
LARGEST_GRADIENT = 1.0
"""Norm to which longer gradients of a step are cut."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt and its answer of T tokens."""

    ids: tuple[int, ...]
    start: int
    """Place of the answer's first token, >= 1."""
    large: torch.Tensor
    """[T] the large model's log-probabilities of the answer's tokens."""


class Tuning:
    """One fine-tuning. Its state is kept in a file after every epoch, from which an interrupted one goes on.

    Args:
        model: as of `deferring.load`.
        train: texts to learn from.
        validation: texts that choose the epoch.
        schedule: `batch` counts texts; the rate rises over WARM_UP of the steps and falls linearly to zero over the rest.
        state: the file; one of another schedule or other texts is not gone on from.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        train: Sequence[Reading],
        validation: Sequence[Reading],
        schedule: Schedule,
        state: Path,
    ) -> None:
        self._model, self._train, self._validation = model, train, validation
        self._schedule, self._file = schedule, state
        digest = ids_digest([text.ids for text in (*train, *validation)])
        self._identity = f"{digest} {len(train)} {astuple(schedule)}"
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=schedule.rate, weight_decay=schedule.weight_decay, betas=(0.9, 0.98)
        )
        self._steps = math.ceil(len(train) / schedule.batch)
        self._epoch = 0
        self._best = Fit(0, 0, float("nan"), float("inf"))
        self._kept: dict[str, torch.Tensor] = {}

    def run(self, progress: Callable[[int, float], None]) -> Fit:
        """Train; the model ends with the weights of its best epoch, in evaluation mode.

        Raises:
            TrainingError: the state file cannot be read or written.
        """
        torch.manual_seed(self._schedule.seed)  # dropout
        if not self._resumed():
            self._best = Fit(0, 0, float("nan"), self._evaluate())
            self._keep()
        while self._epoch < self._schedule.epochs and self._epoch - self._best.best_epoch < self._schedule.patience:
            self._epoch += 1
            learned, reached = self._learn(), self._evaluate()
            progress(self._epoch, reached)
            if reached < self._best.validation_loss:
                self._best = Fit(self._epoch, self._epoch, learned, reached)
                self._keep()
            self._write()
        self._model.load_state_dict(self._kept)
        self._model.train(False)
        best = self._best
        return Fit(self._epoch, best.best_epoch, best.train_loss, best.validation_loss)

    def _learn(self) -> float:
        """One epoch; the mean loss of its tokens."""
        order = torch.Generator().manual_seed(self._schedule.seed * 1000 + self._epoch)
        shuffled = torch.randperm(len(self._train), generator=order).tolist()
        self._model.train()
        total = tokens = 0.0
        for step, start in enumerate(range(0, len(shuffled), self._schedule.batch)):
            batch = [self._train[number] for number in shuffled[start : start + self._schedule.batch]]
            for group in self._optimizer.param_groups:
                group["lr"] = self._schedule.rate * self._rate((self._epoch - 1) * self._steps + step + 1)
            size = sum(len(text.large) for text in batch)
            self._optimizer.zero_grad()
            for piece in _pieces(batch):
                loss = deferral_loss(self._model, piece)
                torch.autograd.backward(loss / size)
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), LARGEST_GRADIENT)
            self._optimizer.step()
            tokens += size
        return total / tokens

    def _rate(self, step: int) -> float:
        every = self._steps * self._schedule.epochs
        rising = max(1, round(WARM_UP * every))
        return step / rising if step <= rising else (every - step + 1) / (every - rising + 1)

    @torch.no_grad()
    def _evaluate(self) -> float:
        self._model.train(False)
        total = sum(deferral_loss(self._model, piece).item() for piece in _pieces(self._validation))
        return total / sum(len(text.large) for text in self._validation)

    def _keep(self) -> None:
        self._kept = {name: value.detach().cpu().clone() for name, value in self._model.state_dict().items()}

    def _write(self) -> None:
        content = {
            "identity": self._identity,
            "epoch": self._epoch,
            "best": astuple(self._best),
            "kept": self._kept,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        unfinished = self._file.with_suffix(".partial")
        try:
            torch.save(content, unfinished)
            unfinished.replace(self._file)
        except (OSError, RuntimeError) as error:  # torch has no narrower one for a full disk
            raise TrainingError(f"{self._file}: cannot be written: {error}") from error

    def _resumed(self) -> bool:
        """Whether the file has a state of this very training, which is now taken up."""
        if not self._file.exists():
            return False
        try:
            content: dict[str, Any] = torch.load(self._file, map_location="cpu", weights_only=True)
            if content["identity"] != self._identity:
                return False
            self._model.load_state_dict(content["model"])
            self._optimizer.load_state_dict(content["optimizer"])
            self._epoch, self._best, self._kept = content["epoch"], Fit(*content["best"]), content["kept"]
        except (OSError, EOFError, RuntimeError, UnpicklingError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{self._file}: cannot be gone on from; delete it, or start over with --fresh"
            ) from error
        return True


def deferral_loss(model: PreTrainedModel, texts: Sequence[Reading]) -> torch.Tensor:
    """[] the loss summed over all tokens of the answers."""
    width = max(len(text.ids) for text in texts) - 1
    first = min(text.start for text in texts) - 1
    ids, inside = torch.zeros(len(texts), width, dtype=torch.int64), torch.zeros(len(texts), width, dtype=torch.bool)
    for number, text in enumerate(texts):  # padding on the right is nothing that a causal model sees
        ids[number, : len(text.ids) - 1] = torch.tensor(text.ids[:-1])
        inside[number, text.start - 1 : len(text.ids) - 1] = True
    device = model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(input_ids=ids.to(device), use_cache=False, logits_to_keep=width - first).logits
    chosen = logits[inside[:, first:].to(device)].float()
    following = torch.cat([torch.tensor(text.ids[text.start :]) for text in texts]).to(device)
    large = torch.cat([text.large for text in texts]).to(device)
    small = -functional.cross_entropy(chosen[:, :-1], following, reduction="none")
    defer = chosen[:, -1]
    mixture = -torch.logaddexp(functional.logsigmoid(-defer) + small, functional.logsigmoid(defer) + large).sum()
    wrong = (chosen[:, :-1].argmax(-1) != following).float()
    weight = torch.full_like(wrong, MISTAKE_WEIGHT)
    search = functional.binary_cross_entropy_with_logits(defer, wrong, pos_weight=weight, reduction="sum")
    return (mixture - small.sum() + search) / 3


def _pieces(texts: Sequence[Reading]) -> Iterator[list[Reading]]:
    """Texts of similar length, PADDED_TOKENS at a time."""
    piece: list[Reading] = []
    for text in sorted(texts, key=lambda one: len(one.ids)):
        if piece and (len(piece) + 1) * len(text.ids) > PADDED_TOKENS:
            yield piece
            piece = []
        piece.append(text)
    if piece:
        yield piece
