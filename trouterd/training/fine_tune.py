"""`trouterd train collm --fine-tune`: the small model learns together with its row, and becomes a directory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional

from algorithms.defer_head import DeferHead
from models.batch import StepOutput
from models.config import FAMILIES, ModelConfig
from models.shape import load_shape
from models.weights import resolve_dtype
from trouterd.config import Config
from trouterd.training import deferring
from trouterd.training.collm import SEARCH_EPOCHS, read_anew
from trouterd.training.faults import TrainingError
from trouterd.training.fit import Schedule, fit
from trouterd.training.head import Labels, Learned, balance
from trouterd.training.options import TrainOptions
from trouterd.training.pair import Pair, PairFiles
from trouterd.training.prompts import Prompt
from trouterd.training.shards import TUNING, Shards, Tensors
from trouterd.training.signal import Signal
from trouterd.training.train import Run, Sidecar, work_folder
from trouterd.training.tuning import Reading, Tuning

PAPER_HIDDEN = 512
"""Hidden size from which on a small model learns as slowly as the paper's."""
SEARCH = Schedule(epochs=SEARCH_EPOCHS, batch=256, rate=1e-3, weight_decay=0.0, patience=SEARCH_EPOCHS, seed=0)


class FineTuneRun(Run):
    """One run of `trouterd train collm --fine-tune`. Its directory appears when all is done; arguments are those of `Run`.

    Raises:
        TrainingError, ModelError: as `Run`, and for small models that cannot get a row.
    """

    def __init__(self, config: Config, route: str, options: TrainOptions) -> None:
        super().__init__(config, route, options)
        self._draft = work_folder(options.output) / "model"
        small = self._files.small
        self._source, self._vocabulary = Path(small.path), Path(small.tokenizer_folder)
        shape = load_shape(self._source)
        if not isinstance(shape, ModelConfig):
            raise TrainingError(
                f"--fine-tune: {small.path}: learns with a row only if it is one of {', '.join(FAMILIES)}"
            )
        resolve_dtype("auto", shape)  # which the directory is written in
        deferring.check_tokenizer(self._vocabulary)

    def run(self) -> Sidecar:
        """Do it all; directory and sidecar are written."""
        sidecar = super().run()
        self._draft.rename(self._options.output)
        return sidecar

    def _check_output(self, output: Path) -> None:
        if output.exists():
            raise TrainingError(f"--output: {output} is there already; delete it, or name another directory")
        super()._check_output(output)

    def _learn(self, pair: Pair, prompts: Sequence[Prompt], shards: Shards, tensors: Tensors) -> Learned:
        labels = self._split(tensors)
        texts = _readings(prompts, tensors)
        train, last = len(self._prompts.train), len(self._prompts.train) + len(self._prompts.validation)
        model = deferring.load(self._source, self._files.tokenizer.vocab_size, pair.small.device)
        deferring.set_row(model, _searched(labels, deferring.row_of(model)))
        plan = _schedule(self._options, pair.small.runner.hidden_size)
        tuning = Tuning(model, texts[:train], texts[train:last], plan, shards.folder / TUNING)
        result = tuning.run(self._bars.epochs("fine-tuning"))
        deferring.save(model, self._source, self._vocabulary, self._draft)
        row = deferring.row_of(model).float()
        del model, tuning  # their memory is wanted by what follows
        tuned = self._tuned().open(
            texts=pair.small.texts, longest_prompt=max(text.start for text in texts), limit=pair.limit
        )
        with self._bars.working("labels of the fine-tuned model"):
            labels = self._split(read_anew(tuned.small, [(text.ids, text.start) for text in texts], tensors))
        head = OwnRow(row)
        return Learned(tuned, labels, head, result, self._threshold(tuned, labels, head))

    def _split(self, tensors: Tensors) -> Labels:
        return Labels.of(tensors, len(self._prompts.train), len(self._prompts.validation))

    def _tuned(self) -> PairFiles:
        small = msgspec.structs.replace(self._files.small, path=str(self._draft), tokenizer="")
        return replace(self._files, small=small)

    def _params(self, threshold: float) -> dict[str, Any]:
        return {"threshold": threshold}

    def _route_lines(self, sidecar: Sidecar) -> str:
        names = self._files.small_name, self._files.large_name
        return (
            f'\n[models.{names[0]}]\npath = "{self._options.output}"\n\n'
            f'[routes.trained]\nmodels = ["{names[0]}", "{names[1]}"]\nalgorithm = "collm"\n'
            f"params = {{ threshold = {sidecar.threshold:.9g} }}"
        )


class OwnRow:
    """The row of a fine-tuned model.

    Args:
        row: [H]
    """

    def __init__(self, row: torch.Tensor) -> None:
        self._row, self._device = DeferHead(row), row.device
        self.signal = Signal(small=self._values)

    def values(self, tensors: Tensors) -> torch.Tensor:
        """Probabilities of deferring."""
        return self._row(tensors["hidden"].to(self._device)).cpu()

    def save(self, path: Path, threshold: float, model: str) -> None:
        """It is in the model's directory."""
        del path, threshold, model

    def _values(self, output: StepOutput, tokens: torch.Tensor) -> torch.Tensor:
        del tokens
        return self._row(output.hidden)


def _schedule(options: TrainOptions, hidden: int) -> Schedule:
    """The paper's; tiny models, which have been trained little, learn faster and longer."""
    large = hidden >= PAPER_HIDDEN
    epochs, batch, rate = (2, 128, 2e-5) if large else (6, 16, 2e-4)
    return Schedule(
        epochs=options.epochs or epochs,
        batch=options.batch or batch,
        rate=options.rate or rate,
        weight_decay=0.0,
        patience=options.patience,
        seed=options.pair.seed,
    )


def _readings(prompts: Sequence[Prompt], tensors: Tensors) -> list[Reading]:
    counts = tensors["text"].bincount(minlength=len(prompts)).tolist()
    answers, large = (torch.split(tensors[name], counts) for name in ("gold", "large"))
    return [
        Reading((*prompt.ids, *answer.tolist()), len(prompt.ids), scores)
        for prompt, answer, scores in zip(prompts, answers, large, strict=True)
    ]


def _searched(labels: Labels, row: torch.Tensor) -> torch.Tensor:
    """[H] the row after a search, before anything else learns, for the places where the large model alone is right."""
    hidden, target = labels.tensors["hidden"].to(row.device), labels.tensors["defer"].float().to(row.device)
    linear = nn.Linear(len(row), 1, bias=False, device=row.device)
    linear.weight = nn.Parameter(row[None].clone())
    weight = balance(target[labels.train])

    def loss(rows: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden[rows]).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, target[rows], pos_weight=weight)

    fit(linear, loss, labels.train, labels.validation, SEARCH, lambda *_: None)
    return linear.weight.detach()[0]
