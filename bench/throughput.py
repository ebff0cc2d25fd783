"""Throughput, latency and cost of OpenAI endpoints, side by side: trouterd's routes and models, and any other server.

    python -m bench.throughput --output DIR --target trouterd=unix:/run/trouterd.sock --control /run/trouterd.ctl
                               --url http://localhost:8000 --model NAME --gpus 2
                               --workload low,agent --streams 1,4,16 --seconds 20 --settle 5
    python -m bench.throughput --experiment a ...     an experiment, with systems of its own; --experiment a --help says more
    python -m bench.throughput --report DIR           all results of experiments in a folder as one report

N clients ask again as soon as they are answered; a window is what they see in --seconds, after each of them has had a token and
--settle seconds more. Writes throughput.json, throughput.md and a plot for each workload into --output. With OPENAI_API_KEY set,
requests carry that key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import uvloop

from bench.command_line import above_zero, run_command, whole_number, whole_numbers
from bench.endpoint import SILENCE
from bench.frontier_fault import FrontierError
from bench.frontier_plot import require_matplotlib
from bench.kv_pools import RoomError
from bench.progress import Progress
from bench.repeats import merged
from bench.surroundings import surroundings
from bench.target import Target
from bench.throughput_plots import write_plots
from bench.throughput_report import number, report
from bench.throughput_systems import System, add_systems, targets
from bench.window import NONCE, Window, measure
from bench.workloads import NAMED, Workload, find

_NAME = "bench.throughput"
_EXPERIMENTS = ("--experiment", "--report")


def main(arguments: list[str]) -> int:
    """Run it; returns the exit code."""
    if any(argument.partition("=")[0] in _EXPERIMENTS for argument in arguments):
        from bench import experiments  # they start systems, and so need much more than this does

        return experiments.main(arguments)
    options = _parse(arguments)
    try:
        if options.plots:
            require_matplotlib()
        options.output.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
            run = _Run(options, shlex.join(["python", "-m", _NAME, *arguments]))
            found = [target for system in options.systems for target in runner.run(run.targets(system, stack))]
            for workload, streams, target in run.plan(found):
                runner.run(run.window(target, workload, streams))
        run.write()
    except (FrontierError, RuntimeError, OSError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    return 1 if run.failures or not run.windows else 0


@dataclass
class _Run:
    """All windows of a command."""

    options: argparse.Namespace
    command: str
    windows: list[Window] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    """System, and what it said; its other windows are left out."""

    def __post_init__(self) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._origin = {"command": self.command, **surroundings(device)}
        self._progress = Progress(0)

    async def targets(self, system: System, stack: ExitStack) -> list[Target]:
        """What can be asked of a system; of what cannot be, the reason is kept."""
        try:
            found, absent = await targets(system, self.options.silence, stack)
        except (RuntimeError, OSError) as error:
            found, absent = [], [(system.name, str(error))]
        for name, reason in absent:
            print(f"{_NAME}: {name}: {reason}", file=sys.stderr)
        self.failures += absent
        return found

    def plan(self, asked: Sequence[Target]) -> list[tuple[Workload, int, Target]]:
        """Systems side by side, so that a machine that changes its pace does not favour one of them."""
        counts, workloads = self.options.streams, self.options.workload
        found = [(workload, count, target) for workload in workloads for count in counts for target in asked]
        self._progress = Progress(len(found))
        return found

    async def window(self, target: Target, workload: Workload, streams: int) -> None:
        """Measure one, unless its system has failed before."""
        title = f"{target.name}, {workload.label}, N = {streams}"
        if target.name in dict(self.failures):
            self._progress.done(f"{title}: left out")
            return
        try:
            window = await self._merged(title, target, workload, streams)
        except (RuntimeError, OSError) as error:
            self.failures.append((target.name, str(error)))
            self._progress.done(f"{title}: failed: {error}")
            return
        if window is None:
            self._progress.done(f"{title}: no room for so many, and what there is room for has been measured")
            return
        self.windows.append(window)
        title = f"{target.name}, {workload.label}, N = {window.streams}"
        self._progress.done(f"{title}: {number(window.tokens_per_second)} token/s")
        self._save()

    async def _merged(self, title: str, target: Target, workload: Workload, streams: int) -> Window | None:
        """All repeats of one, with as many streams as there is room for; None: it has been measured with so many."""
        repeats = range(self.options.repeats)
        try:
            return merged([await self._measured(title, target, workload, streams, number) for number in repeats])
        except RoomError as error:
            done = {(one.system, one.workload, one.streams) for one in self.windows}
            if not error.most:
                raise
            if (target.name, workload.label, error.most) in done:
                return None
            return merged([await self._measured(title, target, workload, error.most, number) for number in repeats])

    async def _measured(self, title: str, target: Target, workload: Workload, streams: int, number: int) -> Window:
        """One of its repeats."""
        options = self.options
        return await measure(
            target,
            workload,
            streams,
            seconds=options.seconds,
            settle=options.settle,
            seed=options.seed + number,
            progress=lambda part: self._progress.show(title, part),
            silence=options.silence,
        )

    def write(self) -> None:
        """The whole result; the tables are printed too."""
        self._save()
        if not self.windows:
            return
        folder, origin = self.options.output, self._origin
        # A server elsewhere may have GPUs all the same: --gpus says so.
        has_gpu = torch.cuda.is_available() or any(system.gpus for system in self.options.systems)
        device = "GPU" if has_gpu else "device"
        head = [
            f"# Throughput\n\n{self.options.seconds:g} s windows on {origin['hardware']}, commit {origin['commit']}."
        ]
        head += [f"`{self.command}`", *(f"{system} failed: {reason}" for system, reason in self.failures)]
        pictures = [path.name for path in write_plots(self.windows, folder, device)] if self.options.plots else []
        pictures = [f"![speed, latency and cost]({name})" for name in pictures if name.endswith(".png")]
        text = report(self.windows, "\n\n".join([*head, *pictures]), device)
        print(text)
        (folder / "throughput.md").write_text(text)

    def _save(self) -> None:
        settings = {name: getattr(self.options, name) for name in ("seconds", "settle", "cut", "seed", "repeats")}
        content = self._origin | {"settings": settings | {"nonce": NONCE}, "failures": self.failures}
        content["windows"] = [asdict(window) for window in self.windows]
        (self.options.output / "throughput.json").write_text(json.dumps(content, indent=1))


def _parse(arguments: list[str]) -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=_NAME, description=__doc__, formatter_class=shape)
    add_systems(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the result")
    names = ", ".join(NAMED)
    parser.add_argument(
        "--workload", type=_words, default=["low"], metavar="LIST", help=f"{names}, IN/OUT in tokens, or a file (low)"
    )
    parser.add_argument(
        "--streams", type=whole_numbers, default=(1, 4, 16), metavar="LIST", help="values of N (1,4,16)"
    )
    parser.add_argument("--seconds", type=above_zero, default=20.0, metavar="S", help="of a window (20)")
    parser.add_argument("--settle", type=above_zero, default=5.0, metavar="S", help="before it (5)")
    parser.add_argument(
        "--cut", type=int, default=0, metavar="TOKENS", help="longest answer, to fit more into a window"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what requests draw (0)")
    parser.add_argument(
        "--repeats", type=whole_number, default=1, metavar="R", help="windows of each, with a seed of their own (1)"
    )
    parser.add_argument(
        "--silence",
        type=above_zero,
        default=SILENCE,
        metavar="S",
        help=f"a request fails after so long without a byte ({SILENCE:g})",
    )
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="tables only; needs no matplotlib")
    options = parser.parse_args(arguments)
    if not options.systems:
        parser.error("name a system with --target NAME=URL or --url URL")
    try:
        options.workload = [find(name, cut=options.cut) for name in options.workload]
    except ValueError as error:
        parser.error(f"argument --workload: {error}")
    return options


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    run_command(_NAME, lambda: main(sys.argv[1:]))
