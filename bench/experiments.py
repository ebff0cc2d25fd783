"""The experiments of the throughput report: each is one command, or shares one with others, and writes one result file.

    python -m bench.throughput --experiment a --small Qwen3-0.6B --large Qwen3-32B --devices cuda:0 --output DIR
    python -m bench.throughput --experiment a --small script:6 --large script:28 --seconds 5 --list --output DIR
    python -m bench.throughput --experiment c,d,e --small Qwen3-0.6B --large Qwen3-32B --devices cuda:0 --output DIR
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
measured. Several of a to g, with commas between, share daemons, windows and the budget, and write a file each; h goes alone. A
second run into the same folder writes a second file; --report puts all files of a folder together.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from bench.command_line import usage_fault
from bench.experiment_arguments import NAME, read
from bench.experiment_case import LARGE, MIDDLE, SMALL, CaseError, Stage, cost, matching, within
from bench.experiment_fit import fitting
from bench.experiment_join import joined
from bench.experiment_quality import LETTER
from bench.experiment_report import write_report
from bench.experiment_result import Result, ResultError, ResultFile, new_file, now
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
from trouterd.config import Model
from trouterd.consistency import is_device
from trouterd.worker.gpu_check import Host, device_problem

STAGES: dict[str, Callable[[Scope], list[Stage]]] = {
    "a": experiment_compare.algorithms,
    "b": experiment_ablation.stages,
    "c": experiment_compare.scaling,
    "d": experiment_switching.stages,
    "e": experiment_thresholds.stages,
    "f": experiment_placement.stages,
    "g": experiment_compare.lengths,
}
"""What each experiment measures."""
_USUAL = ("low",)
_LONG = "high"
_WORKLOADS = {"a": (*_USUAL, "agent", _LONG), "g": (*_USUAL, _LONG)}


def main(arguments: list[str]) -> int:
    """Run an experiment, or put results together; returns the exit code."""
    try:
        options = read(arguments, tuple(STAGES), __doc__)
        options.command = shlex.join(["python", "-m", NAME, *arguments])
        if options.report:
            return _report(options.report)
        start = _quality(options) if options.experiment == (LETTER,) else _windows(options)
    except (CaseError, NetworkError) as error:
        return usage_fault(NAME, error)
    try:
        return start()
    except (CaseError, ResultError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1


def _report(folder: Path) -> int:
    try:
        print(write_report(folder))
    except ResultError as error:
        return usage_fault(NAME, f"--report: {error}")
    except OSError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    print(f"{NAME}: wrote {folder / 'report.md'} and its plots", file=sys.stderr)
    return 0


def _windows(options: argparse.Namespace) -> Callable[[], int]:
    """What measures them, or lists them, when everything has been looked at that can be wrong with the command line."""
    scope = _scope(options)
    scope.setup.check()
    workloads = {letter: scope.workloads or _WORKLOADS.get(letter, _USUAL) for letter in options.experiment}
    fitting(scope.setup, tuple(dict.fromkeys(name for names in workloads.values() for name in names)))
    stages = joined(
        {letter: _asked(options, letter, replace(scope, workloads=workloads[letter])) for letter in workloads}
    )
    stages = [stage.repeated(options.repeats) for stage in stages]
    if options.list:
        return partial(_list, stages, options.seconds, options.budget)
    _require_output(options)
    _require_plans(scope, stages)
    _require_devices(scope.setup.devices)
    return partial(_measure, options, scope, stages)


def _asked(options: argparse.Namespace, letter: str, scope: Scope) -> list[Stage]:
    """The stages of one experiment, with the windows that are asked for."""
    stages = [replace(stage, cases=matching(stage.cases, options.only)) for stage in STAGES[letter](scope)]
    if not any(stage.cases for stage in stages):
        which = f"no window of experiment {letter}" if len(options.experiment) > 1 else "no window"
        raise CaseError(f"--only {','.join(options.only)}: {which} has such a key; --list shows them")
    return [stage for stage in stages if stage.cases]


def _require_output(options: argparse.Namespace) -> None:
    if options.output is None:
        raise CaseError("--output names the folder of the result")


def _require_plans(scope: Scope, stages: Sequence[Stage]) -> None:
    cases = [case for stage in stages for case in stage.cases]
    if problem := scope.steps.obstacle(cases, scope.setup.names):
        raise CaseError(f"--only: {problem}")


def _require_devices(devices: Sequence[str]) -> None:
    host = Host.this()
    for device in devices:
        if problem := device_problem(Model(path="", device=device), host):
            raise CaseError(f"--devices: {problem.partition(': ')[2]}")


def _measure(options: argparse.Namespace, scope: Scope, stages: Sequence[Stage]) -> int:
    setup = scope.setup
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
    paths = {letter: new_file(options.output, letter, setup.pair, setup.placement) for letter in options.experiment}
    device = next((device for device in setup.devices if device != CPU), CPU)
    head = _head(options, device) | facts
    files = [ResultFile(Result({"experiment": letter} | head), path) for letter, path in paths.items()]
    progress = Progress(sum(len(stage.cases) for stage in stages))
    runner = Runner(
        stages,
        files,
        seconds=options.seconds,
        budget=options.budget,
        measure=measuring(options.seconds, options.seed, progress),
        steps=scope.steps,
        progress=progress,
    )
    runner.run()
    for file in files:
        found = file.result
        print(f"{len(found.records)} windows, {len(found.dropped)} dropped, {len(found.failures)} failed: {file.path}")
    return 0 if all(file.result.records and not file.result.failures for file in files) else 1


def _quality(options: argparse.Namespace) -> Callable[[], int]:
    sweeps = experiment_quality.sweeps(options)
    if options.list:
        return partial(experiment_quality.show, options, sweeps)
    _require_output(options)
    return partial(_measure_quality, options)


def _measure_quality(options: argparse.Namespace) -> int:
    path = new_file(options.output, LETTER, "demo", CPU)
    facts = {"experiment": LETTER, "pair": "demo", "placement": CPU, "devices": [CPU], "names": {}}
    result = Result(_head(options, CPU) | facts, points=experiment_quality.quality(options), complete=True)
    result.save(path)
    print(f"{len(result.points)} points: {path}")
    return 0


def _head(options: argparse.Namespace, device: str) -> dict[str, object]:
    origin = surroundings(torch.device(device))
    facts = {"started": now(), "command": options.command, **origin}
    return facts | ({"note": options.note} if options.note else {})


def _list(stages: Sequence[Stage], seconds: float, budget: float) -> int:
    kept, _ = within([(stage.seconds, stage.cases) for stage in stages], seconds, budget)
    total = 0.0
    several = len({letter for stage in stages for case in stage.cases for letter in case.experiments}) > 1
    for stage, fits in zip(stages, kept, strict=True):
        total += stage.seconds * bool(fits) + sum(cost(case, seconds) for case in fits)
        print(f"{stage.name}: {stage.seconds:.0f} s to start")
        for case in stage.cases:
            mark = f", for {','.join(case.experiments)}" if several else ""
            mark += "" if case in fits else "   dropped"
            print(f"  {case.key}   importance {case.importance}, {cost(case, seconds):.3g} s{mark}")
    windows = sum(len(stage.cases) for stage in stages)
    print("Importance: 0 is the most important; with --budget the windows with the highest number are dropped first.")
    print(f"{total:.0f} s in all, {sum(map(len, kept))} of {windows} windows")
    return 0


def _scope(options: argparse.Namespace) -> Scope:
    sources = tuple(source for source in (options.small, options.middle, options.large) if source)
    if not (options.small and options.large):
        raise CaseError("--small and --large name the models")
    devices = _each("--devices", options.devices, len(sources))
    if wrong := [device for device in devices if not is_device(device)]:
        raise CaseError(f"--devices: expected cpu or a CUDA device such as cuda:0, got {wrong[0]!r}")
    setup = Setup(
        sources,
        devices,
        _each("--tensor-parallel", options.tensor_parallel, len(sources)),
        settings=_settings(options, len(sources)),
        handoff=options.handoff_ms / 1e3,
        given_contention=_each("--contention", options.contention, len(sources)) if options.contention else (),
    )
    for workload in options.workloads:
        try:
            find(workload)
        except ValueError as error:
            raise CaseError(f"--workloads: {error}") from error
    return Scope(
        setup=setup,
        workloads=options.workloads,
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
