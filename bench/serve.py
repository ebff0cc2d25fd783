"""What a client gets from a served model: token/s and the gaps between tokens through HTTP, against the model's bare step.

    python -m bench.serve --small Qwen3-0.6B [--large Qwen3-32B --algorithm bernoulli --params 'p = 0.35']
                          [--streams 1,8,64] [--tokens 512] [--prompt 100] [--device cuda:0] [--json FILE] [--markdown FILE]

A model behind the whole daemon, its directory given or random weights of a published shape (on a GPU); with --large also that
model, and the route over both. Every case is run once to warm up and then measured. "of the step" is token/s divided by
streams / step time, where the step time is what the worker measured on the device for the same run: what HTTP, rings, tokenizer
and scheduler leave of the model's own speed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.command_line import run_command, whole_numbers
from bench.daemon import Served
from bench.deployment import Deployment, ModelSpec, RouteSpec, serving
from bench.step_shapes import SHAPES
from bench.surroundings import surroundings

_STEP = re.compile(r'^trouterd_step_seconds_(sum|count)\{model="([^"]+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Case:
    """One measured run."""

    model: str
    streams: int
    tokens_per_second: float
    gap_p50_ms: float
    gap_p99_ms: float | None
    """None of fewer than 100 gaps."""
    first_p50_ms: float
    step_ms: float
    """Mean of the entry's steps in this run."""
    of_the_step: float
    large_share: float
    handoffs_per_100: float


def deployment(options: argparse.Namespace) -> Deployment:
    """What the daemon serves."""
    given = {"small": options.small, "large": options.large}
    settings = (f"context_length = {options.context}", "prefix_cache = false", *options.set)
    models = tuple(
        ModelSpec(name, source, options.device, settings=settings) for name, source in given.items() if source
    )
    if not options.large:
        return Deployment(models)
    return Deployment(models, (RouteSpec("routed", ("small", "large"), options.algorithm, options.params),))


def generate(daemon: Served, model: str, streams: int, tokens: int, prompt: int) -> dict[str, Any]:
    """Run the load generator in its own process."""
    arguments = [f"--socket={daemon.socket}", f"--model={model}", f"--streams={streams}", f"--tokens={tokens}"]
    command = [sys.executable, "-m", "bench.load", *arguments, f"--prompt={prompt}"]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def steps(daemon: Served, model: str) -> tuple[float, float]:
    """Seconds and number of all steps of a model so far."""
    found = {part: float(value) for part, name, value in _STEP.findall(daemon.metrics()) if name == model}
    return found.get("sum", 0.0), found.get("count", 0.0)


def measure(daemon: Served, model: str, streams: int, tokens: int, prompt: int) -> Case:
    """Warm up and measure one case."""
    entry = "small" if model == "routed" else model
    generate(daemon, model, streams, min(tokens, 64), prompt)
    seconds, count = steps(daemon, entry)
    result = generate(daemon, model, streams, tokens, prompt)
    later_seconds, later_count = steps(daemon, entry)
    step = (later_seconds - seconds) / max(later_count - count, 1)
    speed = result["tokens"] / result["seconds"]
    return Case(
        model=model,
        streams=streams,
        tokens_per_second=speed,
        gap_p50_ms=result["gap_ms"]["p50"],
        gap_p99_ms=result["gap_ms"]["p99"],
        first_p50_ms=result["first_ms"]["p50"],
        step_ms=step * 1e3,
        of_the_step=speed * step / streams,
        large_share=result["per_model"].get("large", 0) / result["tokens"],
        handoffs_per_100=100 * result["handoffs"] / result["tokens"],
    )


def table(cases: list[Case]) -> str:
    """The cases as a Markdown table."""
    lines = [
        "| model | streams | token/s | gap p50 ms | p99 / p50 | first ms | step ms | of the step | large share | hand-offs / 100 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        ratio = "-" if case.gap_p99_ms is None else f"{case.gap_p99_ms / max(case.gap_p50_ms, 1e-9):.2f}"
        # A routed stream waits for the other model: its speed says nothing about one model's step.
        share = "" if case.model == "routed" else f"{case.of_the_step:.2f}"
        lines.append(
            f"| {case.model} | {case.streams} | {case.tokens_per_second:,.0f} | {case.gap_p50_ms:.2f} | {ratio}"
            f" | {case.first_p50_ms:.1f} | {case.step_ms:.3f} | {share}"
            f" | {case.large_share:.3f} | {case.handoffs_per_100:.1f} |"
        )
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="bench.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small",
        default="Qwen3-0.6B",
        metavar="MODEL",
        help=f"a directory, or one of {', '.join(SHAPES)} (%(default)s)",
    )
    parser.add_argument("--large", metavar="MODEL", help="also serve this one, and the route over both")
    parser.add_argument("--algorithm", default="bernoulli", metavar="NAME", help="of the route (%(default)s)")
    parser.add_argument(
        "--params",
        default="p = 0.35",
        metavar="TOML",
        help="the route's parameters, the content of an inline table (%(default)s)",
    )
    parser.add_argument(
        "--streams",
        type=whole_numbers,
        default="1,8,64",
        metavar="LIST",
        help="values of N, the requests in flight (%(default)s)",
    )
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        metavar="LIST",
        help="which to measure, of small, large and routed (all)",
    )
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument("--prompt", type=int, default=100, metavar="N", help="tokens of each prompt (%(default)s)")
    parser.add_argument(
        "--context", type=int, default=4096, metavar="N", help="context_length of the models (%(default)s)"
    )
    parser.add_argument("--device", default="cuda:0", help="of the models (%(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="LINE", help="a line for every model's table, e.g. 'depth = 1'"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here too")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure and print."""
    options = parse(arguments)
    models = options.models or (["small", "large", "routed"] if options.large else ["small"])
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as name, serving(deployment(options), Path(name)) as fleet:
        for model in models:
            for streams in options.streams:
                cases.append(measure(fleet.served, model, streams, options.tokens, options.prompt))
                print(table(cases[-1:]).splitlines()[-1], flush=True)
    report = table(cases)
    print(report)
    if options.markdown:
        options.markdown.write_text(report)
    if options.json:
        command = shlex.join(["python", "-m", "bench.serve", *arguments])
        content = {
            "command": command,
            **surroundings(torch.device(options.device)),
            "cases": [asdict(case) for case in cases],
        }
        options.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    run_command("bench.serve", lambda: main(sys.argv[1:]))
