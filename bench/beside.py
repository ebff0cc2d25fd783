"""Two models on one GPU at once: a step of each alone and beside the other, by the part of the GPU that one of them has.

    python -m bench.beside --small Qwen3-0.6B --large Qwen3-32B --percent 12,20,30,40,60,80 --json FILE

Two processes under MPS, without HTTP and without hand-offs; each runs one kind of step without pause. The small model has the
persistent kernel, on each of these percentages of the multiprocessors in turn (0: none has it). Steps are REQUESTSxROWS: a
visit of the large model feeds the rows that it has missed. `contention` is what `trouterctl batching plan --contention` takes:
by how much a step is longer beside a running one of the other model. `together` is what both do in a second by what each would
do alone in it: 1 where they take turns, 2 where neither notices the other. --json is written after each percentage.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.beside_pair import Pair, table
from bench.child import child
from bench.command_line import run_command, usage_fault
from bench.deployment import Deployment, ModelSpec
from bench.experiment_case import LARGE, SMALL
from bench.mps import sharing
from bench.step_heads import HEADS
from bench.step_size import StepSize, step_sizes
from bench.surroundings import surroundings
from models.weights import DTYPES
from trouterd.settings import ConfigError, load

_LEAD = 0.1
"""Seconds that both have to begin before a window does."""


class SideError(Exception):
    """A process did not do what it was asked for; the message says which and why."""


class Side:
    """A process with one model.

    Args:
        name: for messages.
        process: has pipes for its input and output.
        seconds: that a window lasts.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], seconds: float) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError(f"the {name} model's process has no pipes")
        self._name = name
        self._process = process
        self._input, self._output = process.stdin, process.stdout
        self._seconds = seconds

    def warm_up(self, load: StepSize) -> None:
        """Run a kind of step for the first time, when its kernels are compiled. Raises SideError."""
        self.ask(load, 0.0, 0.0)
        self.answer()

    def ask(self, load: StepSize, begin: float, end: float) -> None:
        """Run these steps until `end`; `answer` has what came of it."""
        self._input.write(json.dumps(asdict(load) | {"begin": begin, "end": end}) + "\n")
        self._input.flush()

    def answer(self) -> Mapping[str, Any]:
        """What it says next. Raises SideError."""
        line = self._output.readline()
        if not line:
            raise SideError(f"the {self._name} model's process exited with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise SideError(f"the {self._name} model: {found['error']}")
        return found

    def step_ms(self, load: StepSize) -> float:
        """What it said of a window of these steps. Raises SideError: no step began and ended in it."""
        found = self.answer()
        if not found["steps"]:
            raise SideError(
                f"the {self._name} model: no step of {load} fits into {self._seconds:g} s; give more --seconds"
            )
        return float(found["ms"])


@contextmanager
def side(name: str, options: argparse.Namespace, percent: int, variables: Mapping[str, str]) -> Iterator[Side]:
    """A process with the small or the large model; ends with the block.

    Raises:
        SideError: it did not start.
    """
    asked: Sequence[StepSize] = options.small_steps if name == SMALL else options.large_steps
    arguments = (
        f"--source={options.small if name == SMALL else options.large}",
        f"--device={options.device}",
        f"--dtype={options.dtype}",
        f"--requests={max(steps.requests for steps in asked)}",
        f"--rows={max(steps.rows for steps in asked)}",
        f"--context={options.context}",
        f"--kernel-percent={percent}",
        f"--head={options.head if name == SMALL else 'none'}",
    )
    with child("bench.beside_side", *arguments, variables=variables) as process:
        started = Side(name, process, options.seconds)
        started.answer()
        for steps in asked:
            started.warm_up(steps)
        yield started


def alone(one: Side, load: StepSize, seconds: float) -> float:
    """Milliseconds of a step while the other process does nothing."""
    begin = time.monotonic() + _LEAD
    one.ask(load, begin, begin + seconds)
    return one.step_ms(load)


def beside(sides: tuple[Side, Side], loads: tuple[StepSize, StepSize], seconds: float) -> tuple[float, float]:
    """Milliseconds of a step of each while both run."""
    begin = time.monotonic() + _LEAD
    for one, steps in zip(sides, loads, strict=True):
        one.ask(steps, begin, begin + seconds)
    small, large = (one.step_ms(steps) for one, steps in zip(sides, loads, strict=True))
    return small, large


class Sweep:
    """All pairs, by percentage; `result` grows.

    Args:
        options: of the command.
        variables: environment of each model's process.
    """

    def __init__(self, options: argparse.Namespace, variables: Mapping[str, Mapping[str, str]]) -> None:
        self._options = options
        self._variables = variables
        self.result: dict[str, Any] = {
            **surroundings(torch.device(options.device)),
            "command": shlex.join(["python", "-m", "bench.beside", *options.arguments]),
            "models": {SMALL: options.small, LARGE: options.large},
            "mps": bool(variables[SMALL]),
            "context": options.context,
            "large_percent": options.large_percent,
            "pairs": [],
        }

    def run(self) -> Iterator[list[Pair]]:
        """The pairs of one percentage after the other. Raises SideError."""
        options = self._options
        with side(LARGE, options, options.large_percent, self._variables[LARGE]) as large:
            large_alone = {steps: alone(large, steps, options.seconds) for steps in options.large_steps}
            for percent in options.percent:
                with side(SMALL, options, percent, self._variables[SMALL]) as small:
                    pairs = list(self._pairs(percent, small, large, large_alone))
                self.result["pairs"] += [asdict(pair) for pair in pairs]
                yield pairs

    def _pairs(self, percent: int, small: Side, large: Side, large_alone: Mapping[StepSize, float]) -> Iterator[Pair]:
        seconds = self._options.seconds
        for few in self._options.small_steps:
            small_alone = alone(small, few, seconds)
            for many in self._options.large_steps:
                found = beside((small, large), (few, many), seconds)
                yield Pair(percent, str(few), str(many), small_alone, found[0], large_alone[many], found[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not 0 <= options.large_percent <= 100 - max(options.percent):
        parser.error("--large-percent: kernels whose parts are more than 100 in all could wait for each other for ever")
    options.arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="beside-") as folder, _sharing(options, Path(folder)) as variables:
            pairs = _measured(Sweep(options, variables), options.json)
    except ConfigError as error:
        return usage_fault("bench.beside", error)
    except SideError as error:
        print(f"bench.beside: {error}", file=sys.stderr)
        return 1
    print("\n" + table(pairs))
    return 0


def _measured(sweep: Sweep, file: Path | None) -> list[Pair]:
    """All pairs; each percentage is printed and written when it is there."""
    pairs: list[Pair] = []
    for found in sweep.run():
        pairs += found
        print(table(found).partition("\n\n")[0], flush=True)
        if file:
            file.write_text(json.dumps(sweep.result, indent=1))
    return pairs


@contextmanager
def _sharing(options: argparse.Namespace, folder: Path) -> Iterator[Mapping[str, Mapping[str, str]]]:
    """MPS, as a daemon of both models has it."""
    models = (ModelSpec(SMALL, options.small, options.device), ModelSpec(LARGE, options.large, options.device))
    settings = () if options.mps else ('gpu.mps = "off"',)
    file = folder / "trouterd.toml"
    file.write_text(Deployment(models, (), settings).configuration(folder))
    with sharing(load(file, os.environ), folder) as variables:
        yield variables


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.beside", description=__doc__, formatter_class=formatter)
    parser.add_argument("--small", required=True, metavar="MODEL", help="a directory, or a published shape")
    parser.add_argument("--large", required=True, metavar="MODEL", help="the same")
    parser.add_argument("--device", default="cuda:0", help="the GPU of both (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of weights and KV (%(default)s)")
    parser.add_argument(
        "--percent",
        type=_percentages,
        default="20,40,80",
        metavar="LIST",
        help="of the multiprocessors, for the small model's persistent kernel; 0: none (%(default)s)",
    )
    parser.add_argument(
        "--large-percent", type=int, default=0, metavar="N", help="for a persistent kernel of the large model (0: none)"
    )
    parser.add_argument(
        "--small-steps", type=step_sizes, default="4x1,16x1", metavar="LIST", help="its REQUESTSxROWS (%(default)s)"
    )
    parser.add_argument(
        "--large-steps", type=step_sizes, default="4x3,14x3,12x10", metavar="LIST", help="the same (%(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=600, metavar="TOKENS", help="before the rows of a step (%(default)s)"
    )
    parser.add_argument(
        "--head", choices=HEADS, default="none", help="routing algorithm on the small model's rows (%(default)s)"
    )
    parser.add_argument(
        "--mps", action=argparse.BooleanOptionalAction, default=True, help="side by side; else time slices (--mps)"
    )
    parser.add_argument("--seconds", type=float, default=0.8, metavar="S", help="of a window (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser


def _percentages(text: str) -> tuple[int, ...]:
    found = tuple(map(int, text.split(",")))
    if not all(0 <= percent <= 100 for percent in found):
        raise argparse.ArgumentTypeError(f"expected percentages, got {text!r}")
    return found


if __name__ == "__main__":
    run_command("bench.beside", main)
