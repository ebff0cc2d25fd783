"""Accuracy against the large model's share: every routing algorithm over its thresholds on a task with checkable answers.

    python -m bench.frontier --output DIR [--problems 200] [--work DIR]                         the demo pair and its task
    python -m bench.frontier --output DIR --config FILE --route NAME --dataset FILE [--judge last_number] [--train-prompts FILE]
    python -m bench.frontier --output DIR --socket PATH --route NAME --dataset FILE [--sweep ROUTE:PARAMETER=V,V,...]

A data set has JSON lines of {"messages": [...], "answer": ...} or {"prompt": ..., "answer": ...}. The pair is that of the demo,
of a route of a configuration (one daemon with a route per algorithm is started), or of a route of a running daemon (its own
routes over the same two models are swept). Thresholds are set per request. Heads are trained by `trouterd train` on
--train-prompts, which must hold no question of the task, and kept in --work, so that a run that is broken off goes on with them; or
given. Writes frontier.json, .md, .png and
.svg into --output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.command_line import run_command, usage_fault, whole_number
from bench.daemon import running
from bench.frontier_fault import FrontierError, FrontierUsageError
from bench.frontier_heads import Training, given_heads, refined, trained_heads
from bench.frontier_judge import RULES
from bench.frontier_pair import PREFIX, configured_pair, demo_pair
from bench.frontier_plot import require_matplotlib, write_plot
from bench.frontier_point import Asked, Daemon, Point, Served
from bench.frontier_report import LARGE, SMALL, good_enough_table, points_table, resolution
from bench.frontier_sweeps import Sweep, named, of_route, over_routes
from bench.frontier_task import Task, demo_task, file_task
from bench.surroundings import surroundings
from trouterd.daemon import DaemonError

_NAME = "bench.frontier"
_DEMO_PROMPTS = "demo:2000"
"""What heads for the demo are trained on; the held-out part of them only serves the training's own report."""
_HEADS = "heads"
"""Folder of trained heads below the result's."""
_READY = 600.0
"""Seconds that a daemon gets to load its models."""


def main(arguments: list[str]) -> int:
    """Run it; returns the exit code."""
    options = _parse(arguments)
    try:
        require_matplotlib()
        task = _task(options)
        options.output.mkdir(parents=True, exist_ok=True)
        points, device = _served(options, task) if options.socket is None else _reached(options, task)
    except FrontierUsageError as error:
        return usage_fault(_NAME, error)
    except (FrontierError, DaemonError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    _write(
        options.output, task, points, {"command": shlex.join(["python", "-m", "bench.frontier", *arguments]), **device}
    )
    return 0


def _task(options: argparse.Namespace) -> Task:
    if options.dataset is None:
        return demo_task(options.problems)
    return file_task(options.dataset, options.problems, options.judge, options.max_tokens)


def _served(options: argparse.Namespace, task: Task) -> tuple[list[Point], dict[str, object]]:
    """The points of a daemon that is started here, and where it ran."""
    pair = demo_pair() if options.config is None else configured_pair(options.config, _route(options))
    extra = [of_route(text, pair.routes) for text in options.sweep]
    sweeps = [*named(options.only), *extra]
    names = [sweep.name for sweep in sweeps]
    if twice := [sweep.name for sweep in extra if names.count(sweep.name) > 1]:
        raise FrontierUsageError(
            f"--sweep: {twice[0]} is swept already; leave that out with --only, or rename the route"
        )
    given = given_heads(options.checkpoint, sweeps)
    prompts = options.train_prompts or (_DEMO_PROMPTS if options.config is None else "")
    with tempfile.TemporaryDirectory(prefix="trouterd-frontier-") as name:
        training = Training(options.work or options.output / _HEADS, prompts, task.max_tokens, options.threads)
        checkpoints = given | trained_heads(pair, [sweep for sweep in sweeps if sweep.name not in given], training)
        if without := [sweep.name for sweep in sweeps if sweep.head and sweep.name not in checkpoints]:
            print(f"{_NAME}: no --train-prompts and no --checkpoint, so without {', '.join(without)}", file=sys.stderr)
        sweeps = [sweep.thinned(options.points) for sweep in refined(sweeps, checkpoints) if sweep.name not in without]
        asked = _asked(pair.small, pair.large, sweeps)
        with running(Path(name), pair.configuration(sweeps, checkpoints), ready_timeout=_READY) as daemon:
            points = asyncio.run(_measure(daemon.socket, options.streams, asked, task, pair.large))
    return points, surroundings(torch.device(pair.device))


def _reached(options: argparse.Namespace, task: Task) -> tuple[list[Point], dict[str, object]]:
    """The points of a daemon that runs already, and where this program did."""
    for name in ("only", "checkpoint", "train_prompts", "work"):
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise FrontierUsageError(f"--{flag} does not go with --socket: the routes that the daemon has are swept")
    route = _route(options)
    served = asyncio.run(_models(options.socket))
    if route not in served or len(served[route].models) != 2:
        raise FrontierUsageError(
            f"--route {route}: the daemon has no such route of two models; it has {', '.join(served)}"
        )
    small, large = pair = served[route].models
    routes = {name: one.algorithm for name, one in served.items() if one.models == pair}
    sweeps, others = over_routes(routes)
    if options.sweep:
        sweeps, others = [of_route(text, routes) for text in options.sweep], []
    for other in others:
        print(f"{_NAME}: route {other} is left out; name its parameter with --sweep", file=sys.stderr)
    asked = _asked(small, large, [sweep.thinned(options.points) for sweep in sweeps])
    points = asyncio.run(_measure(options.socket, options.streams, asked, task, large))
    return points, surroundings(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _route(options: argparse.Namespace) -> str:
    if not options.route:
        raise FrontierUsageError("--config and --socket need --route NAME, whose two models are compared")
    return str(options.route)


def _asked(small: str, large: str, sweeps: Sequence[Sweep]) -> list[Asked]:
    ends = [Asked(sweep=SMALL, model=small, reference=True), Asked(sweep=LARGE, model=large, reference=True)]
    return ends + [
        Asked(
            sweep=sweep.name,
            model=sweep.route or PREFIX + sweep.name,
            parameter=sweep.parameter,
            value=value,
            reference=sweep.reference,
        )
        for sweep in sweeps
        for value in sweep.values
    ]


async def _models(socket: Path) -> dict[str, Served]:
    async with Daemon(socket, 1) as daemon:
        return await daemon.served()


async def _measure(socket: Path, streams: int, asked: Sequence[Asked], task: Task, large: str) -> list[Point]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    points = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(asked) * len(task.questions))
        async with Daemon(socket, streams) as daemon:
            for one in asked[:2]:
                # The first steps of a process are slow; these answers do not count.
                await daemon.measure(one, replace(task, questions=task.questions[:streams]), large, lambda: None)
            for one in asked:
                progress.update(bar, description=f"{one.sweep} {one.setting}")
                points.append(await daemon.measure(one, task, large, lambda: progress.advance(bar)))
    return points


def _write(folder: Path, task: Task, points: Sequence[Point], origin: dict[str, object]) -> None:
    """All files of the result; the tables are printed too."""
    count = len(task.questions)
    title = f"{task.name}: {count} questions"
    where = f"On {origin['hardware']}, commit {origin['commit']}: `{origin['command']}`. {resolution(count)}"
    report = f"{title}\n\n{where}\n\n{good_enough_table(points)}\nAll points:\n\n{points_table(points)}"
    print(report)
    (folder / "frontier.md").write_text(report)
    facts = {"name": task.name, "questions": count, "judge": task.judge, "max_tokens": task.max_tokens}
    content = {**origin, "task": facts, "points": [asdict(point) for point in points]}
    (folder / "frontier.json").write_text(json.dumps(content, indent=1))
    write_plot(points, title, [folder / "frontier.png", folder / "frontier.svg"])


def _parse(arguments: list[str]) -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=_NAME, description=__doc__, formatter_class=shape)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the result")
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="JSON lines (default: problems of the demo)")
    parser.add_argument("--judge", choices=RULES, default="exact", help="rule of a data set's answers (default: exact)")
    parser.add_argument("--problems", type=whole_number, default=200, metavar="N", help="questions (default: 200)")
    parser.add_argument(
        "--max-tokens", type=whole_number, default=512, metavar="N", help="of one answer of a data set (default: 512)"
    )
    parser.add_argument(
        "--streams", type=whole_number, default=16, metavar="N", help="requests in flight (default: 16)"
    )
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--config", type=Path, metavar="FILE", help="serve the models of this configuration")
    pair.add_argument("--socket", type=Path, metavar="PATH", help="ask the daemon that listens on this unix socket")
    parser.add_argument("--route", metavar="NAME", help="the route whose two models are compared")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], metavar="NAMES", help="these sweeps (default: all)"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="ROUTE:PARAMETER=V,V", help="sweep a route that exists"
    )
    parser.add_argument(
        "--points", type=whole_number, default=99, metavar="N", help="most points of a sweep (default: all)"
    )
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=FILE", help="a trained head")
    parser.add_argument(
        "--train-prompts",
        metavar="PROMPTS",
        help=f"to train heads on (default, for the demo pair alone: {_DEMO_PROMPTS})",
    )
    parser.add_argument(
        "--threads", type=whole_number, default=1, metavar="N", help="CPU threads of the training (default: 1)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help=f"keep trained heads here, and take those that are there (default: OUTPUT/{_HEADS})",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(_NAME, lambda: main(sys.argv[1:]))
