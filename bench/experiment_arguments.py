"""The command line of experiments."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench import experiment_quality
from bench.command_line import above_zero, not_negative, whole_number, whole_numbers
from bench.experiment_case import CaseError
from bench.experiment_setup import CPU

NAME = "bench.throughput"
_HANDOFF_MS = 0.3
"""About what one takes between idle processes (docs/performance.md)."""
_FOREVER = 1e9
_OF_QUALITY = ("experiment", "report", "output", "list", "streams", "note", *experiment_quality.OPTIONS)
"""What says something to experiment h, whose models, windows and pace are the frontier's."""


def read(arguments: Sequence[str], experiments: Sequence[str], description: str | None) -> argparse.Namespace:
    """The options; ends the process where they are wrong, as argparse does.

    Args:
        arguments: of the command line.
        experiments: those of windows, by letter.
        description: of the help.

    Raises:
        CaseError: there are no such experiments, or they do not go together.
    """
    parser = _parser(description)
    options = parser.parse_args(arguments)
    _check_letters(options.experiment, experiments)
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if options.experiment == (experiment_quality.LETTER,):
        wrong = [name for name in given if name not in _OF_QUALITY]
        why = (
            "does not go with experiment h, which asks the demo pair; --problems, --points and --sweeps bound its time"
        )
    else:
        wrong = [name for name in given if name in experiment_quality.OPTIONS]
        why = "is for experiment h alone"
    if wrong:
        parser.error(f"--{wrong[0].replace('_', '-')} {why}")
    for name in ("workloads", "patterns", "streams"):
        setattr(options, name, tuple(dict.fromkeys(getattr(options, name))))  # windows have a key each
    return options


def _check_letters(letters: Sequence[str], experiments: Sequence[str]) -> None:
    known = (*experiments, experiment_quality.LETTER)
    if unknown := [letter for letter in letters if letter not in known]:
        raise CaseError(f"--experiment: no experiment {unknown[0]!r}; there are {', '.join(known)}")
    if repeated := [letter for letter, count in Counter(letters).items() if count > 1]:
        raise CaseError(f"--experiment: {repeated[0]} is named twice; its windows are measured once")
    if experiment_quality.LETTER in letters and len(letters) > 1:
        raise CaseError(
            f"--experiment: {experiment_quality.LETTER} asks another pair of models, in a command of its own; leave it out"
        )


def _parser(description: str | None) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=NAME, description=description, formatter_class=shape)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--experiment",
        type=_words,
        default=(),
        metavar="LIST",
        help="which one, see above; or several of a to g: c,d,e",
    )
    what.add_argument("--report", type=Path, metavar="DIR", help="put all results in a folder together")
    _add_models(parser)
    _add_windows(parser)
    _add_plans(parser)
    experiment_quality.add_arguments(parser)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    source = "a directory, builtin:small, builtin:large, a published shape (random weights), or script:MS"
    for name, note in (("small", ""), ("middle", "; with it there are three models"), ("large", "")):
        models.add_argument(f"--{name}", default="", metavar="SOURCE", help=source + note)
    models.add_argument(
        "--devices", type=_words, default=(CPU,), metavar="LIST", help=f"one of all models, or one of each ({CPU})"
    )
    models.add_argument(
        "--tensor-parallel", type=whole_numbers, default=(1,), metavar="LIST", help="GPUs of all models, or of each (1)"
    )
    models.add_argument(
        "--context", type=int, default=0, metavar="TOKENS", help="context_length of all models (what each can take)"
    )
    models.add_argument(
        "--model-set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every model: depth=1"
    )
    models.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of all daemons, as in the configuration: small.megakernel_percent=30, batching.overlap=false",
    )


def _add_windows(parser: argparse.ArgumentParser) -> None:
    windows = parser.add_argument_group("windows")
    windows.add_argument("--output", type=Path, metavar="DIR", help="folder of the result")
    windows.add_argument(
        "--workloads", type=_words, default=(), metavar="LIST", help="of docs/throughput.md (the experiment's own)"
    )
    windows.add_argument(
        "--patterns", type=_words, default=(), metavar="LIST", help="routing, the important ones first (all)"
    )
    windows.add_argument(
        "--streams",
        type=whole_numbers,
        default=(),
        metavar="LIST",
        help="values of N (the experiment's own; h: one, 16)",
    )
    windows.add_argument("--seconds", type=above_zero, default=20.0, metavar="S", help="of a window (20)")
    windows.add_argument("--settle", type=not_negative, default=4.0, metavar="S", help="of load before a window (4)")
    windows.add_argument(
        "--learn", type=not_negative, default=20.0, metavar="S", help="the same for the controller (20)"
    )
    windows.add_argument("--seed", type=int, default=0, metavar="N", help="of what requests draw (0)")
    windows.add_argument(
        "--repeats", type=whole_number, default=1, metavar="R", help="windows of each, with a seed of their own (1)"
    )
    windows.add_argument("--only", type=_words, default=(), metavar="KEYS", help="windows by key, with * and ? (all)")
    windows.add_argument(
        "--start",
        type=not_negative,
        default=0.0,
        metavar="S",
        help="that a daemon takes to start and to end (45; CPU: 5)",
    )
    windows.add_argument("--budget", type=not_negative, default=_FOREVER, metavar="S", help="for everything (no limit)")
    windows.add_argument(
        "--note", default="", metavar="TEXT", help="what is particular to this run; the report has it by its verdict"
    )
    windows.add_argument("--list", action="store_true", help="say what would be measured, and how long; starts nothing")
    windows.add_argument(
        "--std-servers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Std. Serving on a daemon for each model (the default), or on the routed daemon's models",
    )
    windows.add_argument("--vllm", type=Path, metavar="FOLDER", help="experiment a: scripts of the peer")


def _add_plans(parser: argparse.ArgumentParser) -> None:
    plans = parser.add_argument_group("plans of how long requests wait")
    plans.add_argument(
        "--step", type=Path, action="append", default=[], metavar="FILE", help="of bench.step, per model"
    )
    plans.add_argument(
        "--contention",
        type=_factors,
        default=(),
        metavar="LIST",
        help="by how much another running model prolongs a step, of all models or of each"
        " (1.5,0.35 for two on one GPU; f measures it)",
    )
    plans.add_argument(
        "--handoff-ms", type=not_negative, default=_HANDOFF_MS, metavar="MS", help="that a hand-off takes (0.3)"
    )
    plans.add_argument(
        "--step-context", type=whole_number, default=1024, metavar="TOKENS", help="of those files, that is taken (1024)"
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _factors(text: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in text.split(","))
    if not all(0 <= number < float("inf") for number in numbers):
        raise argparse.ArgumentTypeError(f"expected numbers of 0 or more, got {text!r}")
    return numbers
