"""`trouterd train`: labels, head, threshold, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from trouterd.config import Config
from trouterd.training.calibration import Target, calibrate, threshold_for_recall
from trouterd.training.citer import CiterTrainer
from trouterd.training.collm import CollmTrainer
from trouterd.training.faults import TrainingError
from trouterd.training.head import Head, Labels, Learned, Trainer
from trouterd.training.options import DEFAULT_RECALL, AlgorithmName, TrainOptions
from trouterd.training.pair import Pair, PairFiles
from trouterd.training.progress import Bars
from trouterd.training.prompts import Prompt, load_prompts
from trouterd.training.query import QueryTrainer
from trouterd.training.r2r import R2RTrainer
from trouterd.training.report import (
    LabelCounts,
    LabelledRows,
    Point,
    Routed,
    answer_held_out,
    curve_table,
    routed_table,
)
from trouterd.training.shards import Shards, Tensors, ids_digest, model_digest
from trouterd.training.sides import Sides

TRAINERS: dict[AlgorithmName, type[Any]] = {
    "citer": CiterTrainer,
    "r2r": R2RTrainer,
    "collm": CollmTrainer,
    "query": QueryTrainer,
}


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a head came out."""

    labels: LabelCounts
    epochs: int
    best_epoch: int
    train_loss: float | None
    """None: no epoch was better than the start."""
    validation_loss: float
    curve: list[Point]
    """On the labels of held-out prompts."""
    routed: Routed


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """`<output>.json`: what goes with a checkpoint."""

    algorithm: str
    threshold: float
    hidden_size: int
    model: str
    """Path of the small model."""
    large_model: str
    target: str
    seed: int
    prompts: str
    report: TrainReport


class Run:
    """One run of `trouterd train`.

    Args:
        config: with the two models.
        route: their route.
        options: the rest of the command line.

    Raises:
        TrainingError, ModelError: before anything is computed, if options, prompts or models are at fault.
    """

    def __init__(self, config: Config, route: str, options: TrainOptions) -> None:
        self._check_output(options.output)
        self._options = options
        self._files = PairFiles.of(config, route)
        pair = options.pair
        self._prompts = load_prompts(pair.prompts, self._files.tokenizer, pair.seed, limit=pair.limit)
        self._target = Target(options.share, options.recall)
        if options.share is None and options.recall is None:
            self._target = Target(recall=DEFAULT_RECALL)
        self._trainer: Trainer = TRAINERS[options.algorithm](options)
        self._bars = Bars()

    def run(self) -> Sidecar:
        """Do it all; checkpoint and sidecar are written."""
        everything = self._prompts.all
        options, longest = self._options, max(len(prompt.ids) for prompt in everything)
        pair = self._files.open(texts=options.pair.texts, longest_prompt=longest, limit=options.pair.max_tokens)
        shards = Shards(work_folder(options.output), self._arguments(everything), fresh=options.fresh)
        torch.set_num_threads(options.threads)
        with self._bars.shown():
            tensors = self._trainer.collect(pair, everything, shards, self._bars.stage("labels", len(everything)))
            learned = self._learn(pair, everything, shards, tensors)
            learned.head.save(options.output, learned.threshold, self._files.small.path)
            with self._bars.working("report"):
                report = self._report(learned)
        sidecar = Sidecar(
            algorithm=options.algorithm,
            threshold=learned.threshold,
            hidden_size=pair.small.runner.hidden_size,
            model=self._files.small.path,
            large_model=self._files.large.path,
            target=str(self._target),
            seed=options.pair.seed,
            prompts=options.pair.prompts,
            report=report,
        )
        sidecar_path(options.output).write_bytes(msgspec.json.format(msgspec.json.encode(sidecar), indent=2) + b"\n")
        return sidecar

    def print(self, sidecar: Sidecar) -> None:
        """The report, and what to write into the configuration."""
        report, console = sidecar.report, Console()
        counts = report.labels
        console.print(
            f"{counts.train} rows to learn from, {counts.validation} to stop by, {counts.held_out} held out;"
            f" {counts.wanted:.1%} of them should go to the large model"
        )
        best = (
            f"best epoch {report.best_epoch} of {report.epochs}"
            if report.best_epoch
            else f"none of {report.epochs} epochs was better than the start, which is kept: try more prompts or another --rate"
        )
        console.print(f"{best}; validation loss {report.validation_loss:.4f}")
        console.print(curve_table(report.curve, sidecar.threshold))
        known = all(prompt.answer is not None for prompt in self._prompts.held_out)
        console.print(routed_table(report.routed, known))
        console.print(f"threshold {sidecar.threshold:.6g} for {sidecar.target}", highlight=False)
        console.print(self._route_lines(sidecar), highlight=False, markup=False, soft_wrap=True)

    def _arguments(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        pair = self._options.pair
        known = [(*(prompt.completion or ()), -1, *(prompt.answer or "").encode()) for prompt in prompts]
        return {
            "algorithm": self._options.algorithm,
            "small model": f"{self._files.small.path} {model_digest(Path(self._files.small.path))}",
            "large model": f"{self._files.large.path} {model_digest(Path(self._files.large.path))}",
            "dtype": [self._files.small.element_type, self._files.large.element_type],
            "prompts": ids_digest([prompt.ids for prompt in prompts]),
            "answers": ids_digest(known),
            "seed": pair.seed,
            "max_tokens": pair.max_tokens,
            **self._trainer.arguments(),
        }

    def _learn(self, pair: Pair, prompts: Sequence[Prompt], shards: Shards, tensors: Tensors) -> Learned:
        """Labels, head and threshold of the last round."""
        rounds = self._options.rounds if isinstance(self._trainer, CiterTrainer) else 1
        for number in range(1, rounds + 1):
            labels = Labels.of(tensors, len(self._prompts.train), len(self._prompts.validation))
            self._require_both(labels)
            name = "training" if rounds == 1 else f"training, round {number}"
            head, fit = self._trainer.fit(pair, labels, self._bars.epochs(name))
            threshold = self._threshold(pair, labels, head)
            if number < rounds and isinstance(self._trainer, CiterTrainer):
                refined = self._trainer.refine(pair, prompts, shards, labels, head, threshold, number + 1)
                if torch.equal(refined["label"], tensors["label"]):
                    break
                tensors = refined
        return Learned(pair, labels, head, fit, threshold)

    def _threshold(self, pair: Pair, labels: Labels, head: Head) -> float:
        """In 0..1, as every head's signal is."""
        if self._target.recall is not None:
            rows, wanted = labels.validation, self._trainer.wanted(labels.tensors)
            values = head.values(labels.tensors)[rows]
            found = threshold_for_recall(values, wanted[rows], self._target.recall, rises=head.signal.rises)
        else:
            with self._bars.working("threshold"):
                ids = [prompt.ids for prompt in self._prompts.validation]
                found, _ = calibrate(pair, head.signal, ids, self._target.share or 0.0)
        return min(1.0, max(0.0, found))

    def _check_output(self, output: Path) -> None:
        if output.is_dir():
            raise TrainingError(f"--output: {output} is a folder; name a file")
        if not output.parent.is_dir():
            raise TrainingError(f"--output: no folder {output.parent}")

    def _params(self, threshold: float) -> dict[str, Any]:
        """Of a route with the head."""
        params: dict[str, Any] = {"checkpoint": str(self._options.output), "threshold": threshold}
        return params | {"source": "hidden"} if self._options.algorithm == "query" else params

    def _route_lines(self, sidecar: Sidecar) -> str:
        params = f'checkpoint = "{self._options.output}"'
        if sidecar.algorithm == "query":
            params = f'source = "hidden", {params}, threshold = {sidecar.threshold:.9g}'
        return (
            f'\n[routes.trained]\nmodels = ["{self._files.small_name}", "{self._files.large_name}"]\n'
            f'algorithm = "{sidecar.algorithm}"\n'
            f"params = {{ {params} }}"
        )

    def _report(self, learned: Learned) -> TrainReport:
        """By the route's own code, from the file that has just been written."""
        pair, labels, head, fit = learned.pair, learned.labels, learned.head, learned.fit
        params = self._params(learned.threshold)
        sides = Sides(pair, (self._files.small_name, self._files.large_name), self._options.algorithm, params)
        prompts = self._prompts.held_out[: self._options.report_prompts]
        routed, _ = answer_held_out(pair, prompts, sides.rule(), self._options.judge)
        wanted, values = self._trainer.wanted(labels.tensors), head.values(labels.tensors)
        rows = LabelledRows(values[labels.held_out], wanted[labels.held_out])
        counts = LabelCounts(
            len(labels.train), len(labels.validation), len(labels.held_out), float(wanted.float().mean())
        )
        return TrainReport(
            labels=counts,
            epochs=fit.epochs,
            best_epoch=fit.best_epoch,
            train_loss=fit.train_loss if fit.best_epoch else None,
            validation_loss=fit.validation_loss,
            curve=rows.curve(head.signal, learned.threshold),
            routed=routed,
        )

    def _require_both(self, labels: Labels) -> None:
        wanted = self._trainer.wanted(labels.tensors)[labels.train]
        if not wanted.any() or wanted.all():
            which = "no" if not wanted.any() else "every"
            raise TrainingError(
                f"--prompts: by its labels {which} row should go to the large model, which leaves nothing to learn;"
                " give more or other prompts"
            )


def work_folder(output: Path) -> Path:
    """Where the labels of a checkpoint are collected."""
    return output.with_name(f"{output.name}.work")


def sidecar_path(output: Path) -> Path:
    """Beside the checkpoint."""
    return output.with_name(f"{output.name}.json")
