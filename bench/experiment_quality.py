"""Experiment h: quality, the large model's share and throughput of every algorithm, from the same answers (`bench.frontier`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench import frontier
from bench.experiment_case import CaseError

FOLDER = "h-frontier"
"""Of the frontier's own result, beside ours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment; they are the frontier's."""
    group = parser.add_argument_group("experiment h")
    group.add_argument("--problems", default="200", metavar="N", help="questions of the demo's task (200)")
    group.add_argument("--points", default="5", metavar="N", help="most points of an algorithm (5)")
    group.add_argument("--sweeps", default="", metavar="NAMES", help="algorithms (all)")
    group.add_argument("--train-prompts", default="demo:2000", metavar="PROMPTS", help="that heads are trained on")
    group.add_argument("--work", default="", metavar="DIR", help="keeps trained heads for other runs")


def quality(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the frontier on the demo pair; its points.

    Raises:
        CaseError: it failed, and has said why.
    """
    folder: Path = options.output / FOLDER
    arguments = [f"--output={folder}", f"--problems={options.problems}", f"--points={options.points}"]
    arguments += [f"--train-prompts={options.train_prompts}", f"--streams={(options.streams or (16,))[0]}"]
    arguments += [f"--only={options.sweeps}"] if options.sweeps else []
    arguments += [f"--work={options.work}"] if options.work else []
    if code := frontier.main(arguments):
        raise CaseError(f"bench.frontier ended with code {code}")
    points: list[dict[str, Any]] = json.loads((folder / "frontier.json").read_text())["points"]
    return points
