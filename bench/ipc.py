"""python -m bench.ipc: the rings against pipes, queues, zmq and Unix sockets, and against their own targets.

All transports take turns in fresh processes, `--repeats` times over; the tables show the median of the repeats. A host
that is busy at the start is marked, because on it tail latencies measure the scheduler.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.command_line import run_command
from bench.ipc_worker import PAIRS

BUSY = 0.5  # load average per core
SIZES = (64, 1024, 65536)
Key = tuple[str, str, int]  # transport, test, size
Results = dict[Key, dict[str, float]]


def cpu_name() -> str:
    """As the kernel prints it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def conditions() -> dict[str, str | float | int | bool]:
    """What the numbers depend on."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    versions = {name: importlib.metadata.version(name) for name in ("uvloop", "msgspec", "pyzmq")}
    return {
        "cpu": cpu_name(),
        "cores": cores,
        "load_average": round(load, 2),
        "busy": load > BUSY * cores,
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }


def plan(quick: bool) -> list[tuple[Key, int]]:
    """What one repeat runs, transports in turn within each test, and with how many messages."""
    sizes = (SIZES[0], SIZES[-1]) if quick else SIZES
    scale = 5 if quick else 1
    cells: list[tuple[Key, int]] = []
    for size in sizes:
        small = size < 4096
        cells += [((name, "round trip", size), (10_000 if small else 4_000) // scale) for name in PAIRS]
        # Slow transports get fewer messages, so that all run for about as long.
        share = {name: 1 if name in ("ring", "ring spin", "zmq") else 4 for name in PAIRS}
        cells += [((name, "stream", size), (300_000 if small else 8_000) // scale // share[name]) for name in PAIRS]
    cells.append((("ring", "push", 64), 500_000 // scale))
    cells.append((("ring", "codec", 16384), 2_000 // scale))
    return cells


def run_cell(key: Key, count: int) -> dict[str, float]:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "bench.ipc_worker", key[0], key[1], str(key[2]), str(count)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    outcome: dict[str, float] = json.loads(result.stdout)
    return outcome


def run_all(repeats: int, quick: bool) -> tuple[Results, dict[Key, list[dict[str, float]]]]:
    """Medians and the single values behind them."""
    single: dict[Key, list[dict[str, float]]] = {}
    cells = plan(quick)
    for repeat in range(repeats):
        for number, (key, count) in enumerate(cells):
            if sys.stderr.isatty():
                place = f"repeat {repeat + 1}/{repeats}, {number + 1}/{len(cells)}"
                print(f"\r{place} ", end="", file=sys.stderr, flush=True)
            single.setdefault(key, []).append(run_cell(key, count))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    medians = {
        key: {name: statistics.median(value[name] for value in values) for name in values[0]}
        for key, values in single.items()
    }
    return medians, single


Target = tuple[str, Callable[[Callable[[str, str, int, str], float]], float], float, bool, str]
"""What, how to compute it from a look-up of medians, the limit, whether larger is better, the unit."""

RATE, MEDIAN, STREAM, TRIP = "messages_per_s", "p50", "stream", "round trip"


def ratio(metric: str, test: str, size: int, ours: str, theirs: str) -> Callable[..., float]:
    """Our median over theirs."""
    return lambda get: get(ours, test, size, metric) / get(theirs, test, size, metric)


TARGETS: list[Target] = [
    ("64 B throughput vs zmq", ratio(RATE, STREAM, 64, "ring", "zmq"), 3, True, "x"),
    ("64 B throughput vs socket", ratio(RATE, STREAM, 64, "ring", "socket"), 5, True, "x"),
    ("64 B throughput vs queue", ratio(RATE, STREAM, 64, "ring", "queue"), 20, True, "x"),
    ("64 KiB throughput in place, spinning, vs zmq", ratio(RATE, STREAM, 65536, "ring spin", "zmq"), 3, True, "x"),
    (
        "64 KiB throughput in place, spinning, vs socket",
        ratio(RATE, STREAM, 65536, "ring spin", "socket"),
        8,
        True,
        "x",
    ),
    ("64 B round trip asleep vs socket", ratio(MEDIAN, TRIP, 64, "ring", "socket"), 1.1, False, "x"),
    ("64 B round trip asleep vs zmq", ratio(MEDIAN, TRIP, 64, "ring", "zmq"), 0.7, False, "x"),
    ("64 B round trip with spin", lambda get: get("ring spin", TRIP, 64, MEDIAN), 5, False, "us"),
    ("64 B round trip with spin vs socket", ratio(MEDIAN, TRIP, 64, "ring spin", "socket"), 0.15, False, "x"),
    ("64 KiB round trip asleep vs socket", ratio(MEDIAN, TRIP, 65536, "ring", "socket"), 0.8, False, "x"),
    ("try_push 64 B, no wake", lambda get: get("ring", "push", 64, "ns") / 1000, 0.5, False, "us"),
    ("wakes per 1,000 messages under load", lambda get: get("ring", STREAM, 64, "wakes_per_1000"), 10, False, ""),
    ("PeerReq 16k tokens, encode + decode", lambda get: get("ring", "codec", 16384, "us"), 10, False, "us"),
]


def check_targets(results: Results) -> list[dict[str, str | float | bool]]:
    """Every target with its value and whether it was met."""

    def get(transport: str, test: str, size: int, metric: str) -> float:
        return results[transport, test, size][metric]

    rows: list[dict[str, str | float | bool]] = []
    for name, compute, limit, larger, unit in TARGETS:
        value = compute(get)
        met = value >= limit if larger else value <= limit
        rows.append({"target": name, "value": value, "limit": limit, "larger": larger, "unit": unit, "met": met})
    return rows


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Columns aligned, the first to the left."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in cells]  # fmt: skip
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def report(results: Results, facts: dict[str, str | float | int | bool], repeats: int) -> str:
    """Everything as text."""
    parts = [", ".join(f"{name} {value}" for name, value in facts.items()) + f", median of {repeats}"]
    if facts["busy"]:
        parts.append("BUSY HOST: other work was running, do not quote p99 and p99.9")
    for size in sorted({size for _, test, size in results if test == TRIP}):
        trips = [(name, results[name, TRIP, size], results[name, STREAM, size]) for name in PAIRS]
        rows = [
            [name, f"{trip['p50']:.1f}", f"{trip['p99']:.1f}", f"{trip['p99.9']:.1f}",
             f"{stream['messages_per_s']:,.0f}", f"{stream['wakes_per_1000']:.1f}" if "ring" in name else "-",
             f"{trip['involuntary_switches']:.0f}", f"{stream['involuntary_switches']:.0f}"]
            for name, trip, stream in trips
        ]  # fmt: skip
        head = [f"{size} B", "p50 us", "p99 us", "p99.9 us", "msg/s", "wakes/1000", "inv. sw. rtt", "inv. sw. stream"]
        parts.append(table(head, rows))
    rows = [
        [str(row["target"]), f"{row['value']:.2f} {row['unit']}", f"{'>=' if row['larger'] else '<='} {row['limit']}",
         "pass" if row["met"] else "MISS"]
        for row in check_targets(results)
    ]  # fmt: skip
    parts.append(table(["target", "measured", "required", ""], rows))
    return "\n\n".join(parts)


def main() -> None:
    """Runs, prints, and writes --json."""
    parser = argparse.ArgumentParser(prog="bench.ipc", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, metavar="N", help="runs, of which medians are shown (5; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="less than a minute: fewer messages, two sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions, medians and single values")
    options = parser.parse_args()
    repeats = options.repeats or (1 if options.quick else 5)
    facts = conditions()
    results, single = run_all(repeats, options.quick)
    print(report(results, facts, repeats))
    if options.json:
        rows = [
            {"transport": key[0], "test": key[1], "size": key[2], "median": results[key], "repeats": values}
            for key, values in single.items()
        ]
        document = {"conditions": facts, "targets": check_targets(results), "results": rows}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    run_command("bench.ipc", main)
