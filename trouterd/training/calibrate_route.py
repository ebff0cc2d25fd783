"""`trouterd calibrate`: the threshold of a route for a share of the large model's tokens."""

from __future__ import annotations

import sys

import msgspec
import torch
from rich.console import Console

from trouterd.config import Config, Route
from trouterd.training.calibration import calibrate, table
from trouterd.training.options import CalibrateOptions
from trouterd.training.pair import PairFiles
from trouterd.training.progress import Bars
from trouterd.training.prompts import load_prompts
from trouterd.training.report import Routed, answer_held_out, routed_table, share_table
from trouterd.training.sides import Sides

PARAMETERS = {"rstitch": "tau", "bernoulli": "p"}
"""What a threshold is called; elsewhere `threshold`."""
HELD_OUT = 0.4
"""Part of the prompts that the threshold is tried on."""


class Row(msgspec.Struct, frozen=True):
    """A threshold, and the large model's share of tokens on the text that it was found on."""

    threshold: float
    share: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    route: str
    algorithm: str
    parameter: str
    threshold: float
    target_share: float
    table: list[Row] = []
    routed: Routed | None = None
    """On prompts that the threshold was not found on; None where nothing had to be written."""


class CalibrationRun:
    """One run of `trouterd calibrate`.

    Args:
        config: the configuration.
        route: whose threshold is wanted.
        options: the rest of the command line.

    Raises:
        TrainingError, ModelError: options, prompts or models are at fault.
    """

    def __init__(self, config: Config, route: str, options: CalibrateOptions) -> None:
        self._options = options
        self._name = route
        self._files = PairFiles.of(config, route)
        self._route: Route = config.routes[route]
        pair = options.pair
        parts = {"validation": 1 - HELD_OUT, "held_out": HELD_OUT}
        self._prompts = load_prompts(pair.prompts, self._files.tokenizer, pair.seed, limit=pair.limit, **parts)
        self._bars = Bars()

    def run(self) -> Calibration:
        """Find the threshold and try it.

        Raises:
            AlgorithmError: the route's parameters are at fault.
            TrainingError: its algorithm has nothing to calibrate.
        """
        name, target = self._route.algorithm, self._options.share
        parameter = PARAMETERS.get(name, "threshold")
        if name == "bernoulli":
            return Calibration(
                route=self._name, algorithm=name, parameter=parameter, threshold=target, target_share=target
            )
        used = self._prompts.validation + self._prompts.held_out
        pair = self._files.open(
            texts=self._options.pair.texts,
            longest_prompt=max(len(prompt.ids) for prompt in used),
            limit=self._options.pair.max_tokens,
        )
        names = (self._files.small_name, self._files.large_name)
        with torch.inference_mode(), self._bars.shown():
            signal = Sides(pair, names, name, self._route.params).signal()
            with self._bars.working("threshold"):
                ids = [prompt.ids for prompt in self._prompts.validation]
                threshold, series = calibrate(pair, signal, ids, target)
            with self._bars.working("held-out prompts"):
                sides = Sides(pair, names, name, self._route.params | {parameter: threshold})
                routed, _ = answer_held_out(pair, self._prompts.held_out, sides.rule(), "answer")
        return Calibration(
            route=self._name,
            algorithm=name,
            parameter=parameter,
            threshold=threshold,
            target_share=target,
            table=[Row(*point) for point in table(signal, series)],
            routed=routed,
        )

    def print(self, result: Calibration) -> None:
        """JSON or tables on standard output."""
        if self._options.json:
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
            return
        console = Console()
        if result.routed is not None:
            console.print(share_table([(row.threshold, row.share) for row in result.table]))
            known = all(prompt.answer is not None for prompt in self._prompts.held_out)
            console.print(routed_table(result.routed, known))
        line = f"routes.{result.route}.params.{result.parameter} = {result.threshold:.9g}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
