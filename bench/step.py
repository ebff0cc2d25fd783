"""Time of one step on a device: decode, extend, prefill and whole answers, each against the least that it can take.

    python -m bench.step --shape Qwen3-0.6B [--head r2r] [--vllm FOLDER] [--json FILE] [--markdown FILE]
    python -m bench.step --model DIRECTORY --device cpu --dtype float32 --batches 1,4 --contexts 64

Drives what a worker drives (`models.resident`): sampling, the routing algorithm and the tests for the end of an answer are part of
each step. Without --model the weights are random, which changes no time. Decode starts at once at the wanted context, over
pages of zeros. A case that does not fit into memory is left out and named. --json is written after every section, so that a run
that is cut short leaves what it has. --vllm runs the peer of `bench.step_peer` first, on the free device.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.command_line import run_command, usage_fault
from bench.peer_folder import PeerError
from bench.step_arguments import SECTIONS, parser
from bench.step_floor import Ceilings, step_work
from bench.step_heads import Head, make_head
from bench.step_kernels import profile_steps
from bench.step_model import Options, open_runner
from bench.step_peer import PeerStep, run_peer
from bench.step_report import markdown
from bench.step_rig import Rig, Timing, TooLargeError
from bench.step_shapes import write_shape
from bench.step_size import StepSize
from bench.surroundings import surroundings
from models.config import ModelConfig, ModelError
from models.resident import NO_ROUTE
from models.weights import DTYPES

_PROFILE_STEPS = 20
_MARGIN = 16
"""Tokens of context beside those that a case asks for."""


class Bench:
    """Cases over one model; results gather in `result`."""

    def __init__(self, options: argparse.Namespace, directory: Path, peer: Sequence[PeerStep]) -> None:
        self._options = options
        self._peer = {step.batch: step for step in peer}
        self._config = ModelConfig.load(directory)
        device = torch.device(options.device)
        dtype = DTYPES[options.dtype]
        self._element_bytes = dtype.itemsize
        self._ceilings = Ceilings.measure(device, dtype)
        started = time.perf_counter()
        runner = open_runner(
            Options(
                directory=directory,
                device=device,
                dtype=options.dtype,
                dummy=options.model is None,
                max_slots=_most_requests(options),
                context_length=min(self._config.context_length, _longest(options)),
                kv_tokens=options.kv_tokens or _most_tokens(options),
                depth=options.depth,
                megakernel=options.megakernel,
                kernel_share=options.kernel_percent / 100,
            )
        )
        head = make_head(options.head, runner, device)
        self._head_bytes = 0 if head is None else head.bytes
        route = self._set_route(runner.set_routes, head)
        if options.graphs:
            runner.capture()
        self._rig = Rig(
            runner,
            max_slots=_most_requests(options),
            route=route,
            params=() if head is None else head.params,
            temperature=options.temperature,
            seconds=options.seconds,
            most_steps=options.steps,
        )
        self.result: dict[str, Any] = {
            **surroundings(device),
            "command": shlex.join(["python", "-m", "bench.step", *options.arguments]),
            "model": {
                "name": options.shape if options.model is None else str(directory),
                "parameters": self._config.parameters(),
                "dtype": options.dtype,
                "kv_tokens": runner.num_pages * runner.page_size,
                "graph_bytes": runner.graph_bytes,
                "ready_s": time.perf_counter() - started,
            },
            "options": {
                name: getattr(options, name)
                for name in ("depth", "graphs", "megakernel", "kernel_percent", "head", "temperature")
            },
            "ceilings": asdict(self._ceilings),
            "skipped": [],
        }

    def _set_route(self, set_routes: Callable[..., tuple[bool, ...]], head: Head | None) -> int:
        if head is None:
            return NO_ROUTE
        if not all(set_routes([head.route])):
            raise ModelError(f"--head {head.route.name}: cannot be decided on {self._options.device}")
        return 0

    def decode(self) -> None:
        """One row per request."""
        for context in self._options.contexts:
            for batch in self._options.batches:
                facts = {"batch": batch, "context": context}
                self._case("decode", facts, partial(self._rig.decode, batch, context), context)

    def extend(self) -> None:
        """A few rows per request."""
        context = self._options.extend_context
        for batch in self._options.extend_batches:
            for count in self._options.extend_tokens:
                facts = {"batch": batch, "count": count, "context": context}
                self._case("extend", facts, partial(self._rig.extend, batch, count, context), context, count)

    def prefill(self) -> None:
        """One request, all rows of its prompt."""
        for count in self._options.prefill:
            self._case("prefill", {"batch": 1, "count": count}, partial(self._rig.prefill, count), 0, count)

    def generate(self) -> None:
        """Answers from prompt to end, the setting of the peer."""
        prompt, output = self._options.prompt, self._options.output
        for batch in self._options.generate_batches:
            facts: dict[str, Any] = {"batch": batch, "prompt": prompt, "output": output}
            if peer := self._peer.get(batch):
                facts |= {
                    "peer_step_ms": peer.step_ms,
                    "peer_prompts_ms": peer.prompts_ms,
                    "peer_version": peer.version,
                }

            self._case("generate", facts, partial(self._answers, facts), prompt + output / 2)

    def _answers(self, facts: dict[str, Any]) -> Timing:
        """The second of two runs: kernels may be compiled in the first."""
        batch, prompt = facts["batch"], facts["prompt"]
        self._rig.generate(batch, prompt, 2)
        timing, facts["prompts_ms"] = self._rig.generate(batch, prompt, facts["output"])
        return timing

    def profile(self) -> None:
        """Kernels of a step."""
        for size in self._options.profile_steps:
            self._profile(size)

    def _profile(self, size: StepSize) -> None:
        run = partial(self._rig.repeat, size.requests, size.rows, self._options.extend_context, _PROFILE_STEPS)
        try:
            run()
            found = profile_steps(run, _PROFILE_STEPS)
        except TooLargeError as error:
            self._skip(f"profile {size}: {error}")
            return
        if found is None:
            self._skip(f"profile {size}: the profiler sees no kernels of a CUDA device")
            return
        facts = {"batch": size.requests, "count": size.rows, "context": self._options.extend_context}
        self.result.setdefault("profile", []).append(facts | asdict(found))

    def _case(
        self, section: str, facts: dict[str, Any], run: Callable[[], Timing], start: float, count: int = 1
    ) -> None:
        try:
            timing = run()
        except TooLargeError as error:
            self._skip(f"{section} {_words(facts)}: {error}")
            return
        work = step_work(
            self._config,
            self._element_bytes,
            runs=facts["batch"],
            start=start,
            count=count,
            head_bytes=self._head_bytes,
        )
        floor, bound = work.floor_ms(self._ceilings), work.bound(self._ceilings)
        case = facts | asdict(timing) | {"floor_ms": floor, "bound": bound, "floor_bytes": work.bytes}
        self.result.setdefault(section, []).append(case)
        print(
            f"{section} {_words(facts)}: {timing.wall_ms:.3f} ms, device {timing.device_ms:.3f},"
            f" floor {floor:.3f} ({bound}, {floor / timing.wall_ms:.0%}), launch {timing.launch_us:.0f} us",
            flush=True,
        )

    def _skip(self, case: str) -> None:
        self.result["skipped"].append(case)
        print(f"left out: {case}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit code 1 where every case was left out."""
    options = parser(__doc__ or "").parse_args(argv)
    options.arguments = sys.argv[1:] if argv is None else list(argv)
    torch.set_num_threads(options.threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = _measure(options, options.model or write_shape(options.shape, Path(folder), options.layers))
    except ModelError as error:
        return usage_fault("bench.step", error)
    except PeerError as error:
        print(f"bench.step: {error}", file=sys.stderr)
        return 1
    if not any(section in result for section in SECTIONS):
        print("bench.step: nothing was measured: every case was left out", file=sys.stderr)
        return 1
    return 0


def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The result, which has the sections of which something was measured."""
    shape = None if options.model else options.shape
    peer: list[PeerStep] = []
    if options.vllm:
        peer = run_peer(options.vllm, shape, options.generate_batches, options.prompt, options.output)
    bench = Bench(options, directory, peer)
    for section in SECTIONS:
        if section in options.sections:
            getattr(bench, section)()
            if options.json:
                _write(options.json, json.dumps(bench.result, indent=1))
    report = markdown(bench.result)
    print("\n" + report)
    if options.markdown:
        _write(options.markdown, report)
    return bench.result


def _most_requests(options: argparse.Namespace) -> int:
    """Requests of the largest step of any case."""
    needs = {
        "decode": options.batches,
        "extend": options.extend_batches,
        "prefill": (1,),
        "generate": options.generate_batches,
        "profile": [size.requests for size in options.profile_steps],
    }
    most: int = max(max(needs[section]) for section in options.sections)
    return most


def _longest(options: argparse.Namespace) -> int:
    """Tokens of the longest request of any case."""
    needs = {
        "decode": max(options.contexts) + options.steps,
        "extend": options.extend_context + max(options.extend_tokens),
        "prefill": max(options.prefill),
        "generate": options.prompt + options.output,
        "profile": options.extend_context + max(size.rows for size in options.profile_steps),
    }
    longest: int = max(needs[section] for section in options.sections)
    return longest + _MARGIN


def _most_tokens(options: argparse.Namespace) -> int:
    """Tokens of the KV pool that no case exceeds, room for whole pages included."""
    return _most_requests(options) * (_longest(options) + _MARGIN)


def _words(facts: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, int))


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text)
    scratch.replace(path)


if __name__ == "__main__":
    run_command("bench.step", main)
