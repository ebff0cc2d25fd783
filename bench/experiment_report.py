"""Puts the results of experiments in a folder together: one report in Markdown, with plots beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.experiment_case import STD
from bench.experiment_compared import compared
from bench.experiment_details import details, latencies
from bench.experiment_group import Group
from bench.experiment_markdown import cell, table
from bench.experiment_plots import write_plots
from bench.experiment_result import Result, read_results
from bench.experiment_settings import told
from bench.experiment_sharing import placed
from bench.experiment_tables import ablated, lengthened, mistaken, scaled_up, switched
from bench.experiment_targets import targets_table
from bench.experiment_time import spent_table
from bench.patterns import DRAWN
from trouterd.batching.placement import SEPARATE, SHARED

FILE = "report.md"
APART = "a card each"
"""System of experiment f, beside those of one card."""
TITLES = {
    "a": "Algorithms against the large model alone and Std. Serving",
    "b": "Ablation",
    "c": "From one stream to many",
    "d": "The price of a hand-off: every n-th token by the large model",
    "e": "Wrong thresholds",
    "f": "One card, or a card each",
    "g": "Long answers",
    "h": "Quality, share and throughput",
}
_TABLES: dict[str, Callable[[Group], str]] = {
    "a": compared,
    "b": ablated,
    "c": scaled_up,
    "d": switched,
    "e": mistaken,
    "f": placed,
    "g": lengthened,
}
_ONE_WINDOW = (
    "One window for each point, so that their spread is not known: differences of a few percent may be chance."
)
_STD_ON_ONE = """\
Std. Serving had no servers of its own here: the routed daemon's models answered, through the one api process of that daemon, which
is to its disadvantage."""
_NO_HEADS = "A scripted model has no hidden states: beside one no head runs."
_NOTES = """\
- *planned B*: lists of `trouterctl batching plan`, from step times of the models alone (same run) and the rates in the names;
  *learned B*: the controller's (`auto`), after a while of this load; in brackets what was in force, small model first.
  *eager*: every launch takes what is ready.
- *large only*: the large model without routing, same workload and streams, in the fastest way that was measured: by itself in a
  daemon of its own (with the persistent kernel, without it, over all GPUs), or by its name in the daemon that routes. \\* behind
  a ratio: to a window of another run on the same kind of card.
- *drawn*: shares of steps that handed over (p) and back (q) in the window, for the ones that are in the name: a window of seconds
  misses them by some percent, and routed windows of one run draw alike. *at nominal rates*: the ratio for the latter, to first
  order (time in steps of each model by the steps there, time between steps by the hand-offs). Targets are judged by it.
- *measured* against a target is the fastest of the planned, learned and eager windows, chosen afterwards; *learned B* is what
  the daemon does unless told otherwise.
- Times: means, medians, 95th percentiles of 20 or more, 99th of 100 or more. \\* behind a time to the first token: no request
  began in the window, and it is that of all N beginning at once. *held*: for how long a launch was held back;
  *waited for a launch*: requests, from when they could take a row to the launch of it, *admission* for new ones alone. *Estimated*:
  time to the first token, and the mean time per token for the others. *cached*: of the tokens that came to a model.
- *of ideal*: of the token/s of requests that never wait, in steps as long as the window's in the mean and with its own moves: the
  part of their time that requests are in steps; for every system alike. *at the pace alone*: of their time, what the steps would
  take if they were as long as for that model alone with one row a request.
- *Std. Serving*: a dispatcher outside of the servers asks for one token a call, by the same draws. No head runs for it, which is
  to its advantage.
- *Std. Serving on vLLM*: the peer's script sends N requests of 100 and 64 tokens at once and waits for the last of them, prefill
  and drain included; beside it there is ours at `100/64`, which goes on with N requests all the time.
- N: requests in flight, closed loop. GPU-s: GPUs that the system keeps times seconds.
"""


def write_report(folder: Path) -> str:
    """Read all results in a folder, write `report.md` and its plots there; returns the text.

    Raises:
        ResultError: there is no result, or a file is none.
    """
    results = read_results(folder)
    groups = _grouped(results)
    parts = ["\n".join(_lead(results)), "# Throughput of token routing", _NOTES]
    if aims := targets_table(groups):
        parts.append(f"## Targets, one H200\n\n{aims}")
    for group in groups:
        parts.append(_section(group, folder))
    text = "\n".join(part.rstrip() + "\n" for part in parts if part)
    (folder / FILE).write_text(text)
    return text


def _lead(results: Sequence[Result]) -> Iterable[str]:
    """What a reader must know first."""
    if any(result.head.get("names") for result in results):
        yield DRAWN
        if any(result.head.get("heads") is False for result in results):
            yield _NO_HEADS
    for result in results:
        if note := result.head.get("note"):
            yield f"\n**Experiment {result.head['experiment']}, {result.head['started']}**: {note}"


def _grouped(results: Sequence[Result]) -> list[Group]:
    """By experiment, models, placement, hardware and settings, in the order of experiments."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for result in side_by_side(results):
        key = *(str(result.head[name]) for name in ("experiment", "hardware", "pair", "placement")), _settings(result)
        found.setdefault(key, []).append(result)
    return [Group(found[key]) for key in sorted(found)]


def side_by_side(results: Sequence[Result]) -> list[Result]:
    """Experiment f is about placements: where there are results of both, those of separate cards go beside the shared one's."""
    shared = {_where(result) for result in results if _is_placed(result, SHARED)}
    return [
        _apart(result) if _is_placed(result, SEPARATE) and _where(result) in shared else result for result in results
    ]


def _is_placed(result: Result, placement: str) -> bool:
    return (result.head["experiment"], result.head["placement"]) == ("f", placement)


def _where(result: Result) -> tuple[str, ...]:
    return str(result.head["hardware"]), str(result.head["pair"]), _settings(result)


def _settings(result: Result) -> str:
    """What all of its daemons were given."""
    return told(result.head.get("settings", {}))


def _apart(result: Result) -> Result:
    records = [replace(record, case=replace(record.case, system=APART)) for record in result.records]
    return replace(result, head=result.head | {"placement": SHARED}, records=records)


def _section(group: Group, folder: Path) -> str:
    experiment = str(group.head["experiment"])
    parts = [f"## {TITLES[experiment]}: {group.title}", "\n".join(_origin(group))]
    points = [point for result in group.results for point in result.points]
    if points:
        parts.append(_quality(points))
    elif group.windows:
        parts.append(_TABLES[experiment](group))
        routed = [one for one in group.windows if one.case.subject in group.names]
        if times := spent_table(group, routed):
            parts.append(f"Where the time goes, ms of a request per token of its answer:\n\n{times}")
        parts.append(f"<details><summary>All windows</summary>\n\n{details(group)}\n{latencies(group)}\n</details>")
    parts += [f"![]({path.name})" for path in write_plots(group, points, folder)]
    parts.append("\n".join(_lacking(group)))
    return "\n\n".join(part.rstrip() for part in parts if part)


def _origin(group: Group) -> Iterable[str]:
    """Where and how it was measured."""
    for result in group.results:
        head = result.head
        versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
        window = f"; windows of {head['seconds']:g} s" if "seconds" in head else ""
        dirty = " with changes that were not committed" if str(head["commit"]).endswith("+") else ""
        commit = f"commit {head['commit']}{dirty}"
        yield f"- {head['started']}: {head['hardware']}, {versions}, {commit}{window}: `{head['command']}`"
        if result.records and not any(record.window.get("repeats") for record in result.records):
            yield f"  - {_ONE_WINDOW}"
        if not head.get("std_servers") and any(record.case.system == STD for record in result.records):
            yield f"  - {_STD_ON_ONE}"


def _lacking(group: Group) -> Iterable[str]:
    """What should have been measured, too."""
    there = {one.case.key for one in group.windows}
    dropped = [key for result in group.results for key in result.dropped if key not in there]
    failed = {key: why for result in group.results for key, why in result.failures if key not in there}
    if dropped:
        yield f"Left out for lack of time ({len(dropped)}): {', '.join(f'`{key}`' for key in dropped)}"
    if failed:
        yield "Failed:"
        yield from (f"- `{key}`: {why}" for key, why in failed.items())


def _quality(points: Sequence[dict[str, Any]]) -> str:
    head = ("algorithm", "at", "right", "tokens by large", "token/s", "hand-offs / 100", "large steps per answer")
    rows = [
        (
            point["sweep"],
            point["setting"],
            f"{point['accuracy']:.1%}",
            f"{point['large_share']:.1%}",
            cell(float(point["tokens_per_second"])),
            float(point["handoffs_per_100"]),
            float(point["large_forwards"]),
        )
        for point in points
    ]
    return table(head, rows, 2)
