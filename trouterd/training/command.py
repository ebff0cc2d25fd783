"""Command lines of `trouterd train` and `trouterd calibrate`; imports nothing heavy until one of them runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trouterd.config import Config
from trouterd.training.faults import TrainingError, TrainingUsageError
from trouterd.training.options import ALGORITHMS, DEFAULT_RECALL, CalibrateOptions, PairOptions, TrainOptions

_ROUTE = "pair"
"""The route of two models that are given as directories."""
EPILOG = """\
PROMPTS is a file of JSON lines, {"prompt": TEXT} or {"messages": [...]}, each with an optional "answer" (the right final
answer) and "completion" (a right answer in full); or demo, or demo:COUNT, for problems of the demo pair.
"""
Load = Callable[[Mapping[str, Any] | None], Config]
"""Loads the configuration; what is given takes the place of a file."""


def add_train(parser: argparse.ArgumentParser) -> None:
    """Options of `trouterd train`."""
    parser.add_argument("algorithm", choices=ALGORITHMS, help="whose head is trained")
    parser.add_argument("--route", metavar="NAME", help="the route of the pair; its first model is the small one")
    parser.add_argument("--small", metavar="DIR", help="the small model, in place of --route")
    parser.add_argument("--large", metavar="DIR", help="the large model")
    _add_pair(parser, default_tokens=256)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the checkpoint; FILE.json goes with it"
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-share", type=_part, metavar="X", help="threshold for this part of the tokens by the large model"
    )
    target.add_argument(
        "--min-recall",
        type=_part,
        metavar="X",
        help=f"threshold that finds this part of what should go to the large model (default: {DEFAULT_RECALL})",
    )
    parser.add_argument("--fresh", action="store_true", help="throw away labels of an earlier run")
    parser.add_argument(
        "--judge",
        choices=("answer", "text"),
        default="answer",
        help="what two continuations are compared by: their final answers, or their texts (default: answer)",
    )
    parser.add_argument("--rounds", type=_positive, default=2, metavar="N", help="citer: rounds of labels (default: 2)")
    parser.add_argument(
        "--fine-tune",
        action="store_true",
        help="collm: train the whole small model together with the row; --output is a directory",
    )
    parser.add_argument(
        "--width", type=_positive, default=0, metavar="N", help="r2r: width of the blocks (default: by the small model)"
    )
    parser.add_argument(
        "--blocks", type=_positive, default=0, metavar="N", help="r2r: blocks (default: by the small model)"
    )
    parser.add_argument(
        "--epochs", type=_positive, default=0, metavar="N", help="most epochs (default: the algorithm's own)"
    )
    parser.add_argument(
        "--rate", type=_rate, default=0.0, metavar="X", help="learning rate of AdamW (default: the algorithm's own)"
    )
    parser.add_argument(
        "--batch", type=_positive, default=0, metavar="N", help="rows of a training step (default: the algorithm's own)"
    )
    parser.add_argument(
        "--patience", type=_positive, default=10, metavar="N", help="epochs without progress (default: 10)"
    )
    parser.add_argument(
        "--threads", type=_positive, default=1, metavar="N", help="CPU threads of the training (default: 1)"
    )
    parser.add_argument(
        "--report-prompts",
        type=_positive,
        default=200,
        metavar="N",
        help="most held-out prompts to answer (default: 200)",
    )


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Options of `trouterd calibrate`."""
    parser.add_argument("--route", required=True, metavar="NAME", help="the route to calibrate")
    _add_pair(parser, default_tokens=256)
    parser.add_argument(
        "--target-share",
        type=_part,
        required=True,
        metavar="X",
        help="part of the tokens that the large model should write",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def train(options: argparse.Namespace, load: Load) -> None:
    """Run `trouterd train`. Raises ConfigError, TrainingError."""
    config, route = _pair(options, load)
    chosen = TrainOptions(
        algorithm=options.algorithm,
        output=options.output,
        pair=_pair_options(options),
        share=options.target_share,
        recall=options.min_recall,
        fresh=options.fresh,
        judge=options.judge,
        rounds=options.rounds,
        width=options.width,
        blocks=options.blocks,
        epochs=options.epochs,
        rate=options.rate,
        batch=options.batch,
        patience=options.patience,
        fine_tune=options.fine_tune,
        threads=options.threads,
        report_prompts=options.report_prompts,
    )
    run = _mended(lambda: _run_of(chosen)(config, route, chosen))
    run.print(_mended(run.run))


def calibrate(options: argparse.Namespace, config: Config) -> None:
    """Run `trouterd calibrate`. Raises TrainingError."""
    chosen = CalibrateOptions(pair=_pair_options(options), share=options.target_share, json=options.json)
    from trouterd.training.calibrate_route import CalibrationRun

    run = _mended(lambda: CalibrationRun(config, options.route, chosen))
    run.print(_mended(run.run))


def _run_of(options: TrainOptions) -> type[Any]:
    if not options.fine_tune:
        from trouterd.training.train import Run

        return Run
    if options.algorithm != "collm":
        raise TrainingUsageError(f"--fine-tune: is for collm; the small model of {options.algorithm} stays as it is")
    from trouterd.training.fine_tune import FineTuneRun

    return FineTuneRun


def _mended(work: Callable[[], Any]) -> Any:
    """The result of `work`; faults of models and algorithms, whose classes are heavy to import, become TrainingError."""
    from algorithms.registry import AlgorithmError
    from models.config import ModelError

    try:
        return work()
    except (AlgorithmError, ModelError) as error:
        raise TrainingError(str(error)) from error


def _pair(options: argparse.Namespace, load: Load) -> tuple[Config, str]:
    """The configuration and the route of the pair."""
    if options.route:
        if options.small or options.large:
            raise TrainingUsageError("--route and --small/--large exclude each other")
        return load(None), options.route
    if not (options.small and options.large):
        raise TrainingUsageError("name the pair: --route NAME, or --small DIR and --large DIR")
    if options.config is not None:
        raise TrainingUsageError(
            "--small and --large take no configuration file; settings go with --set models.small.KEY=VALUE"
        )
    models = {name: {"path": getattr(options, name)} for name in ("small", "large")}
    return load({"models": models, "routes": {_ROUTE: {"models": list(models)}}}), _ROUTE


def _add_pair(parser: argparse.ArgumentParser, default_tokens: int) -> None:
    parser.add_argument("--prompts", required=True, metavar="PROMPTS", help="a JSONL file, or demo, or demo:COUNT")
    parser.add_argument("--limit", type=_positive, default=0, metavar="N", help="use the first N prompts")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the split, of the training and of demo problems (default: 0)"
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        default=default_tokens,
        metavar="N",
        help=f"of one answer (default: {default_tokens})",
    )
    parser.add_argument("--texts", type=_positive, default=64, metavar="N", help="texts read at once (default: 64)")


def _pair_options(options: argparse.Namespace) -> PairOptions:
    return PairOptions(
        prompts=options.prompts,
        seed=options.seed,
        max_tokens=options.max_tokens,
        texts=options.texts,
        limit=options.limit,
    )


def _part(text: str) -> float:
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _rate(text: str) -> float:
    return _number(text, lambda value: 0 < value < 10, "a positive number")


def _positive(text: str) -> int:
    return int(_number(text, lambda value: value >= 1 and value.is_integer(), "a positive integer"))


def _number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value
