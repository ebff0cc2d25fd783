"""What the daemon itself costs: routed token/s, CPU per token and hand-off latency with models whose step takes no time.

    python -m bench.overhead [--streams 64] [--tokens 512] [--share 0.1] [--repeats 5] [--json FILE]

Two scripted models behind the whole daemon (HTTP, rings, schedulers, hand-offs), `bernoulli` routing at the given share. The load
generator is a process of its own on the same cores, as a client on the same host would be; its CPU is shown apart. Hand-off
latency is taken from sending a hand-off to the start of its first step at the receiver: under load, and with one stream,
when the peer is idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.command_line import run_command
from bench.daemon import Served
from bench.deployment import SCRIPT, Deployment, ModelSpec, RouteSpec, serving

WARM_UP_TOKENS = 64


def deployment(share: float) -> Deployment:
    """Two models that take no time, and the route over them."""
    models = tuple(ModelSpec(name, f"{SCRIPT}0") for name in ("small", "large"))
    return Deployment(models, (RouteSpec("demo", ("small", "large"), "bernoulli", f"p = {share}"),))


def generate(daemon: Served, model: str, streams: int, tokens: int) -> dict[str, Any]:
    """Run the load generator in its own process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [f"--socket={daemon.socket}", f"--model={model}", f"--streams={streams}", f"--tokens={tokens}"]
    command = [sys.executable, "-m", "bench.load", *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result: dict[str, Any] = json.loads(output)
    result["client_cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result


def measure(daemon: Served, model: str, streams: int, tokens: int) -> dict[str, Any]:
    """One run: token/s, CPU microseconds per token by process, hand-offs and their latency."""
    before = daemon.cpu_seconds()
    result = generate(daemon, model, streams, tokens)
    after = daemon.cpu_seconds()
    count = result["tokens"]
    latency = {name: w["handoff_us"] for name, w in daemon.ctl("status")["workers"].items()}
    return {
        "tokens_per_second": count / result["seconds"],
        "cpu_us_per_token": {name: (after[name] - before[name]) / count * 1e6 for name in before},
        "client_cpu_us_per_token": result["client_cpu"] / count * 1e6,
        "handoffs": result["handoffs"],
        "large_share": result["per_model"].get("large", 0) / count,
        "handoff_us": latency,
    }


def measured(share: float, model: str, streams: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Repeated runs on a daemon of their own, whose hand-off latencies are therefore those of these runs alone."""
    with tempfile.TemporaryDirectory() as folder, serving(deployment(share), Path(folder)) as fleet:
        generate(fleet.served, model, streams, WARM_UP_TOKENS)
        return [measure(fleet.served, model, streams, tokens) for _ in range(repeats)]


def benchmark(streams: int, tokens: int, share: float, repeats: int) -> dict[str, Any]:
    """All figures: routed and one model under load, and one routed stream."""
    return {
        "machine": f"{os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "streams": streams,
        "tokens": tokens,
        "share": share,
        "routed": measured(share, "demo", streams, tokens, repeats),
        "single_model": measured(share, "small", streams, tokens, repeats),
        "one_stream": measured(share, "demo", 1, 4 * tokens, repeats),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def report(result: dict[str, Any]) -> str:
    """The figures as text: medians over the repeats."""
    lines = [f"{result['machine']}; medians of {len(result['routed'])} runs; load {result['load_average']:.1f}"]
    for name, title in (
        ("routed", f"routed, {result['streams']} streams"),
        ("single_model", f"one model, {result['streams']} streams"),
        ("one_stream", "routed, 1 stream"),
    ):
        runs = result[name]
        cpu = {p: statistics.median(r["cpu_us_per_token"][p] for r in runs) for p in runs[0]["cpu_us_per_token"]}
        shares = ", ".join(f"{process} {value:.1f}" for process, value in cpu.items())
        lines.append(
            f"{title}: {_median(runs, 'tokens_per_second'):,.0f} token/s; daemon CPU {sum(cpu.values()):.1f} us/token ({shares});"
            f" client {_median(runs, 'client_cpu_us_per_token'):.1f} us/token; large share {_median(runs, 'large_share'):.3f}"
        )
    for title, name in (("under load", "routed"), ("idle peer", "one_stream")):
        for model in ("large", "small"):
            p50 = statistics.median(r["handoff_us"][model]["p50"] for r in result[name])
            p99 = statistics.median(r["handoff_us"][model]["p99"] for r in result[name])
            lines.append(f"hand-off to {model}, {title}: p50 {p50:.0f} us, p99 {p99:.0f} us")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="requests in flight (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument(
        "--share", type=float, default=0.1, metavar="P", help="of the tokens, by the large model (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs, of which medians are shown (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all runs here")
    options = parser.parse_args()
    result = benchmark(options.streams, options.tokens, options.share, options.repeats)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    run_command("bench.overhead", main)
