"""The experiments of the throughput report: each is one command, and writes one result file.

    python -m bench.throughput --experiment a --small Qwen3-0.6B --large Qwen3-32B --devices cuda:0 --output DIR
    python -m bench.throughput --experiment a --small script:6 --large script:28 --seconds 5 --list --output DIR
    python -m bench.throughput --report DIR

a  every algorithm on every workload, against the large model alone and Std. Serving
b  what each part of the engine is worth: one is off at a time
c  from 1 stream to 128
d  the price of a hand-off: switching after every n tokens
e  wrong thresholds of delayed batching
f  one card, with and without limits, or a card each
g  answers of 2,048 tokens and of 8,192
h  quality, share and throughput of every algorithm, on the demo pair

Windows are measured by importance as long as --budget lasts, and the file is written after each of them. --list says what would be
measured. A second run into the same folder writes a second file; --report puts all files of a folder together.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench import (
    experiment_ablation,
    experiment_compare,
    experiment_placement,
    experiment_quality,
    experiment_switching,
    experiment_thresholds,
)
from bench.experiment_case import LARGE, MIDDLE, SMALL, CaseError, Stage, cost, matching, within
from bench.experiment_report import write_report
from bench.experiment_result import Result, ResultError, new_file, now
from bench.experiment_run import Runner
from bench.experiment_scope import Scope
from bench.experiment_settings import Settings
from bench.experiment_setup import CPU, Setup
from bench.experiment_steps import StepTimes
from bench.experiment_windows import measuring
from bench.patterns import ME, PATTERNS, Mixture, Pattern
from bench.progress import Progress
from bench.surroundings import surroundings
from bench.window import NONCE
from bench.workloads import find
from trouterd.batching.network import NetworkError

_STAGES: dict[str, Callable[[Scope], list[Stage]]] = {
    "a": experiment_compare.algorithms,
    "b": experiment_ablation.stages,
    "c": experiment_compare.scaling,
    "d": experiment_switching.stages,
    "e": experiment_thresholds.stages,
    "f": experiment_placement.stages,
    "g": experiment_compare.lengths,
}
QUALITY = "h"
_USUAL = ("low",)
_LONG = "high"
_WORKLOADS = {"a": (*_USUAL, "agent", _LONG), "g": (*_USUAL, _LONG)}
_HANDOFF_MS = 0.3
"""About what one takes between idle processes (docs/performance.md)."""
_FOREVER = 1e9


def main(arguments: list[str]) -> int:
    """Run an experiment, or put results together; returns the exit code."""
    options = _parser().parse_args(arguments)
    options.command = shlex.join(["python", "-m", "bench.throughput", *arguments])
    try:
        if options.report:
            print(write_report(options.report))
            return 0
        return _quality(options) if options.experiment == QUALITY else _measure(options)
    except (CaseError, NetworkError, ResultError) as error:
        print(f"bench.throughput: {error}", file=sys.stderr)
        return 1


def _measure(options: argparse.Namespace) -> int:
    scope = _scope(options)
    scope.setup.check()
    stages = [replace(stage, cases=matching(stage.cases, options.only)) for stage in _STAGES[options.experiment](scope)]
    stages = [stage.repeated(options.repeats) for stage in stages if stage.cases]
    if not stages:
        raise CaseError(f"--only {','.join(options.only)}: no window has such a key; --list shows them")
    if options.list:
        _list(stages, options.seconds, options.budget)
        return 0
    if options.output is None:
        raise CaseError("--output names the folder of the result")
    setup = scope.setup
    path = new_file(options.output, options.experiment, setup.pair, setup.placement)
    facts = {
        "pair": setup.pair,
        "placement": setup.placement,
        "devices": list(setup.devices),
        "tensor_parallel": list(setup.tensor_parallel),
        "seconds": options.seconds,
        "seed": options.seed,
        "repeats": options.repeats,
        "nonce": NONCE,
        "names": {pattern.key: pattern.name for pattern in scope.patterns},
        "heads": setup.has_heads,
        "std_servers": options.std_servers,
        "settings": dict(setup.settings.values),
        "contention": list(setup.given_contention),
    }
    device = next((device for device in setup.devices if device != CPU), CPU)
    result = Result(_head(options, device) | facts)
    progress = Progress(sum(len(stage.cases) for stage in stages))
    runner = Runner(
        stages,
        result,
        path,
        seconds=options.seconds,
        budget=options.budget,
        measure=measuring(options.seconds, options.seed, progress),
        steps=scope.steps,
        progress=progress,
    )
    runner.run()
    print(f"{len(result.records)} windows, {len(result.dropped)} dropped, {len(result.failures)} failed: {path}")
    return 0 if result.records and not result.failures else 1


def _quality(options: argparse.Namespace) -> int:
    if options.output is None:
        raise CaseError("--output names the folder of the result")
    path = new_file(options.output, QUALITY, "demo", CPU)
    facts = {"pair": "demo", "placement": CPU, "devices": [CPU], "names": {}}
    result = Result(_head(options, CPU) | facts, points=experiment_quality.quality(options), complete=True)
    result.save(path)
    print(f"{len(result.points)} points: {path}")
    return 0


def _head(options: argparse.Namespace, device: str) -> dict[str, object]:
    origin = surroundings(torch.device(device))
    facts = {"experiment": options.experiment, "started": now(), "command": options.command, **origin}
    return facts | ({"note": options.note} if options.note else {})


def _list(stages: Sequence[Stage], seconds: float, budget: float) -> None:
    kept, _ = within([(stage.seconds, stage.cases) for stage in stages], seconds, budget)
    total = 0.0
    for stage in stages:
        fits = [case for case in stage.cases if case.key in kept]
        total += stage.seconds * bool(fits) + sum(cost(case, seconds) for case in fits)
        print(f"{stage.name}: {stage.seconds:.0f} s to start")
        for case in stage.cases:
            mark = "" if case.key in kept else "   dropped"
            print(f"  {case.key}   importance {case.importance}, {cost(case, seconds):.3g} s{mark}")
    windows = sum(len(stage.cases) for stage in stages)
    print(f"{total:.0f} s in all, {len(kept)} of {windows} windows")


def _scope(options: argparse.Namespace) -> Scope:
    sources = tuple(source for source in (options.small, options.middle, options.large) if source)
    if not (options.small and options.large):
        raise CaseError("--small and --large name the models")
    setup = Setup(
        sources,
        _each("--devices", options.devices, len(sources)),
        _each("--tensor-parallel", options.tensor_parallel, len(sources)),
        settings=_settings(options, len(sources)),
        handoff=options.handoff_ms / 1e3,
        given_contention=_each("--contention", options.contention, len(sources)) if options.contention else (),
    )
    workloads = options.workloads or _WORKLOADS.get(options.experiment, _USUAL)
    for workload in workloads:
        try:
            find(workload)
        except ValueError as error:
            raise CaseError(f"--workloads: {error}") from error
    return Scope(
        setup=setup,
        workloads=workloads,
        streams=options.streams,
        patterns=_patterns(options.patterns, len(sources)),
        settle=options.settle,
        learn=options.learn,
        steps=StepTimes.read(setup.names, options.step, options.step_context),
        vllm=options.vllm,
        daemon_start=options.start,
        own_servers=options.std_servers,
    )


def _settings(options: argparse.Namespace, models: int) -> Settings:
    """What all daemons get; what is said of one model counts before what is said of every one."""
    of_every = [*([f"context_length={options.context}"] if options.context else []), *options.model_set]
    names = (SMALL, MIDDLE, LARGE) if models == 3 else (SMALL, LARGE)
    return Settings.read([*(f"*.{text}" for text in of_every), *options.set], names)


def _patterns(names: Sequence[str], models: int) -> tuple[Pattern | Mixture, ...]:
    """Of three models there is one."""
    known: dict[str, Pattern | Mixture] = {one.key: one for one in ((ME,) if models == 3 else PATTERNS)}
    if unknown := [name for name in names if name not in known]:
        raise CaseError(f"--patterns: no pattern {unknown[0]!r} of {models} models; there are {', '.join(known)}")
    return tuple(known[name] for name in names or known)


def _each(flag: str, given: tuple, count: int) -> tuple:  # type: ignore[type-arg]  # of anything
    if len(given) not in (1, count):
        raise CaseError(f"{flag}: {len(given)} given for {count} models")
    return given * count if len(given) == 1 else given


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.throughput", description=__doc__, formatter_class=shape)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--experiment", choices=(*_STAGES, QUALITY))
    what.add_argument("--report", type=Path, metavar="DIR", help="put all results in a folder together")
    models = parser.add_argument_group("models")
    source = "a directory, builtin:small, a published shape (random weights), or script:MS"
    for name in ("small", "middle", "large"):
        models.add_argument(f"--{name}", default="", metavar="SOURCE", help=source)
    models.add_argument("--devices", type=_words, default=(CPU,), metavar="LIST", help="of all models, or of each")
    models.add_argument("--tensor-parallel", type=_counts, default=(1,), metavar="LIST", help="the same for GPUs")
    models.add_argument("--context", type=int, default=0, metavar="TOKENS", help="context_length of all models")
    models.add_argument("--model-set", action="append", default=[], metavar="KEY=VALUE", help="of every model")
    models.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of all daemons, as in the configuration: small.megakernel_percent=30, batching.overlap=false",
    )
    windows = parser.add_argument_group("windows")
    windows.add_argument("--output", type=Path, metavar="DIR", help="folder of the result")
    windows.add_argument("--workloads", type=_words, default=(), metavar="LIST")
    windows.add_argument("--patterns", type=_words, default=(), metavar="LIST", help="by importance")
    windows.add_argument("--streams", type=_counts, default=(), metavar="LIST")
    windows.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of a window (20)")
    windows.add_argument("--settle", type=float, default=4.0, metavar="S", help="of load before a window (4)")
    windows.add_argument("--learn", type=float, default=20.0, metavar="S", help="the same for the controller (20)")
    windows.add_argument("--seed", type=int, default=0, metavar="N", help="of what requests draw (0)")
    windows.add_argument(
        "--repeats", type=int, default=1, metavar="R", help="windows of each, with a seed of their own (1)"
    )
    windows.add_argument("--only", type=_words, default=(), metavar="KEYS", help="windows by key, with * and ?")
    windows.add_argument(
        "--start", type=float, default=0.0, metavar="S", help="that a daemon takes to start and to end (45; CPU: 5)"
    )
    windows.add_argument("--budget", type=float, default=_FOREVER, metavar="S", help="for everything")
    windows.add_argument(
        "--note",
        default="",
        metavar="TEXT",
        help="what is particular to this run; the report has it beside its verdict",
    )
    windows.add_argument("--list", action="store_true", help="say what would be measured, and how long it takes")
    windows.add_argument(
        "--step", type=Path, action="append", default=[], metavar="FILE", help="of bench.step, per model: for plans"
    )
    windows.add_argument(
        "--contention",
        type=_factors,
        default=(),
        metavar="LIST",
        help="for plans: by how much another running model prolongs a step, of all models or of each"
        " (0.25,4 for two on one GPU; f measures it)",
    )
    windows.add_argument("--handoff-ms", type=float, default=_HANDOFF_MS, metavar="MS", help="for plans (0.3)")
    windows.add_argument(
        "--step-context", type=int, default=1024, metavar="TOKENS", help="that is taken of them (1024)"
    )
    windows.add_argument(
        "--std-servers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Std. Serving on a daemon for each model (the default), or on the routed daemon's models",
    )
    windows.add_argument("--vllm", type=Path, metavar="FOLDER", help="experiment a: scripts of the peer")
    experiment_quality.add_arguments(parser)
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _factors(text: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in text.split(","))
    if not all(0 <= number < float("inf") for number in numbers):
        raise argparse.ArgumentTypeError(f"expected numbers of 0 or more, got {text!r}")
    return numbers


def _counts(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers from 1 on, got {text!r}")
    return numbers
