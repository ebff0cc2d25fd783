"""Experiment h: quality, the large model's share and throughput of every algorithm, from the same answers (`bench.frontier`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import frontier
from bench.command_line import whole_number
from bench.experiment_case import CaseError
from bench.frontier_fault import FrontierError
from bench.frontier_sweeps import Sweep, named

LETTER = "h"
FOLDER = "h-frontier"
"""Of the frontier's own result, beside ours."""
OPTIONS = ("problems", "points", "sweeps", "train_prompts", "work")
"""Of this experiment alone."""
_STREAMS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment; they are the frontier's."""
    group = parser.add_argument_group("experiment h")
    add = group.add_argument
    add("--problems", type=whole_number, default=200, metavar="N", help="questions of the demo's task (200)")
    add("--points", type=whole_number, default=5, metavar="N", help="most points of an algorithm (5)")
    add("--sweeps", default="", metavar="NAMES", help="algorithms (all)")
    add("--train-prompts", default="demo:2000", metavar="PROMPTS", help="that heads are trained on (demo:2000)")
    add("--work", default="", metavar="DIR", help=f"keeps trained heads for other runs (OUTPUT/{FOLDER}/heads)")


def sweeps(options: argparse.Namespace) -> tuple[Sweep, ...]:
    """The algorithms that are asked for.

    Raises:
        CaseError: there is none of such a name, or several numbers of streams are given.
    """
    if len(options.streams) > 1:
        raise CaseError("--streams: experiment h takes one number")
    try:
        return named(options.sweeps.split(",") if options.sweeps else ())
    except FrontierError as error:
        raise CaseError(str(error).replace("--only", "--sweeps")) from error


def show(options: argparse.Namespace, listed: Sequence[Sweep]) -> int:
    """Print what would be measured."""
    points = [min(len(sweep.values), options.points) for sweep in listed]
    for sweep, count in zip(listed, points, strict=True):
        head = "   after training a head" if sweep.head else ""
        print(f"  {sweep.name}   {sweep.parameter}, up to {count} points{head}")
    total = sum(points) + 2
    print(
        f"{total} points, the two models alone among them, of {options.problems} questions at N = {_streams(options)}"
    )
    return 0


def quality(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the frontier on the demo pair; its points.

    Raises:
        CaseError: it failed, and has said why.
    """
    folder: Path = options.output / FOLDER
    arguments = [f"--output={folder}", f"--problems={options.problems}", f"--points={options.points}"]
    arguments += [f"--train-prompts={options.train_prompts}", f"--streams={_streams(options)}"]
    arguments += [f"--only={options.sweeps}"] if options.sweeps else []
    arguments += [f"--work={options.work}"] if options.work else []
    if code := frontier.main(arguments):
        raise CaseError(f"bench.frontier ended with code {code}")
    points: list[dict[str, Any]] = json.loads((folder / "frontier.json").read_text())["points"]
    return points


def _streams(options: argparse.Namespace) -> int:
    return int(options.streams[0]) if options.streams else _STREAMS
