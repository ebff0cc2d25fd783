"""Results of experiments as a run writes them, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.experiment_case import STD, TROUTERD, Case, Record
from bench.experiment_result import Result

HARDWARE = "NVIDIA H200, CUDA 13.0"
SHARES = {"small": 0.65, "large": 0.35}
"""Of tokens, where all hand-overs are for one token and come at a rate of 0.35."""
PAIR = "Qwen3-0.6B+Qwen3-32B"
R2R = "r2r-35"


def window(case: Case, rate: float, **fields: Any) -> dict[str, Any]:
    """One of so many tokens/s; a routed one's requests are half of the time in steps."""
    half = case.streams / 4
    times = {"mean": 2.0, "p50": 1.5, "p95": 3.0, "p99": 4.0}
    names = ("small", "large") if case.subject not in ("small", "large") else (case.subject,)
    return {
        "system": case.system,
        "workload": case.workload,
        "streams": case.streams,
        "seconds": 20.0,
        "tokens_per_second": rate,
        "ttft_ms": times,
        "gap_ms": times,
        "request_ms": None,
        "requests": 0,
        "tokens_per_model": {name: rate * SHARES[name] for name in names} if len(names) > 1 else {names[0]: rate},
        "handoffs_per_100": 70.0,
        "batch": dict.fromkeys(names, max(half, 1.0)),
        "step_ms": {name: {"small": 1.0, "large": 15.0}[name] for name in names},
        "busy": dict.fromkeys(names, 0.5),
        "gpu_seconds_per_1000": 1e3 / rate,
        "large_forwards_per_1000": 300.0,
        "ideal": None,
        "extra": {"handoff_ms": 0.2},
    } | fields


def case(subject: str, streams: int, batching: str = "", system: str = TROUTERD, **fields: Any) -> Case:
    given: dict[str, Any] = {"system": system, "workload": "low", "subject": subject, "streams": streams}
    return Case(**given | {"batching": batching} | fields)


def record(one: Case, rate: float, **facts: Any) -> Record:
    return Record(one, window(one, rate), facts)


def result(experiment: str, records: list[Record], started: str = "2026-11-30T10:00:00Z", **head: Any) -> Result:
    facts = {
        "experiment": experiment,
        "started": started,
        "command": f"python -m bench.throughput --experiment {experiment}",
        "hardware": HARDWARE,
        "versions": {"torch": "2.11.0"},
        "commit": "abc1234",
        "pair": PAIR,
        "placement": "shared",
        "devices": ["cuda:0", "cuda:0"],
        "seconds": 20.0,
        "names": {"r2r-35": "R2R, p = 0.35"},
        "heads": True,
        "std_servers": True,
    }
    return Result(facts | head, records, complete=True)


def compared(large: float = 50.0, factor: float = 1.0) -> list[Record]:
    """Experiment a at one and at four streams."""
    rates = {1: (large, 2.5, 1.0), 4: (4 * large, 2.0, 0.5)}
    found = []
    for streams, (alone, routed, std) in rates.items():
        found += [
            record(case("large", streams), alone),
            record(case("small", streams), 20 * alone),
            record(
                case(R2R, streams, "planned"),
                factor * routed * alone,
                predicted=600.0,
                thresholds={"small": 1, "large": streams},
            ),
            record(case(R2R, streams, system=STD), std * alone),
        ]
    return [*found, record(case(R2R, 4, "auto"), 1.5 * 4 * large)]


def rows(text: str, *words: str) -> list[list[str]]:
    """Cells of the table rows with all these words."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in found if all(any(word in one for one in row) for word in words)]


def part(text: str, title: str) -> str:
    """The first table below a line with these words."""
    _, after = text.split(title, 1)
    return after.split("\n\n", 2)[1]


def saved(folder: Path, *results: Result) -> Path:
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(results):
        one.save(folder / f"{number}.json")
    return folder
