"""Puts the results of experiments in a folder together: one report in Markdown, with plots beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.experiment_case import STD
from bench.experiment_compared import compared
from bench.experiment_details import details, latencies
from bench.experiment_draws import drawn_line
from bench.experiment_dropped import FEW, summary
from bench.experiment_glossary import glossary
from bench.experiment_group import Group
from bench.experiment_markdown import WAYS, cell, table
from bench.experiment_plots import write_plots
from bench.experiment_result import Result, read_results
from bench.experiment_settings import told
from bench.experiment_sharing import placed
from bench.experiment_tables import ablated, lengthened, mistaken, scaled_up, switched
from bench.experiment_targets import targets_table
from bench.experiment_time import spent_table
from bench.experiment_worth import notes, worth_it
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
_TARGETS = """\
## The project's own targets, one H200

What trouterd's developers aim at with this pair on one card. *measured* is the fastest of the planned, learned and eager windows,
chosen afterwards, of experiment a where that has them; targets are judged by the ratio at nominal rates."""
_ONE_WINDOW = (
    "One window for each point, so that their spread is not known: differences of a few percent may be chance."
)
_STD_ON_ONE = (
    "Std. Serving had no servers of its own here: the routed daemon's models answered, through the one api process of that daemon,"
    " which is to its disadvantage."
)


def write_report(folder: Path) -> str:
    """Read all results in a folder, write `report.md` and its plots there; returns the text.

    Raises:
        ResultError: there is no result, or a file is none.
    """
    results = read_results(folder)
    groups = _grouped(results)
    verdict, told = worth_it(groups)
    sections = [_section(group, folder, told) for group in groups]
    if aims := targets_table(groups):
        sections.append(f"{_TARGETS}\n\n{aims}")
    terms = glossary("\n".join([verdict, *sections]))
    parts = [drawn_line(results), "# Throughput of token routing", verdict, terms, *sections]
    text = "\n".join(part.rstrip() + "\n" for part in parts if part)
    (folder / FILE).write_text(text)
    return text


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


def _section(group: Group, folder: Path, told: Sequence[Result]) -> str:
    """Of an experiment.

    Args:
        group: its windows.
        folder: for plots.
        told: results whose notes have been told.
    """
    experiment = str(group.head["experiment"])
    parts = [f"## {TITLES[experiment]}: {group.title}"]
    parts += notes(one for one in group.results if not any(one is other for other in told))
    parts.append("\n".join(_origin(group, told)))
    points = [point for result in group.results for point in result.points]
    if points:
        parts.append(_quality(points))
    elif group.windows:
        parts.append(_TABLES[experiment](group))
        routed = [one for one in group.windows if one.case.subject in group.names]
        if times := spent_table(group, routed):
            parts.append(f"Where the time goes, ms of a request per token of its answer:\n\n{times}")
        parts.append(f"<details><summary>All windows</summary>\n\n{details(group)}\n{latencies(group)}\n</details>")
    parts += [f"![{plot.shows}]({plot.path.name})" for plot in write_plots(group, points, folder)]
    parts.append("\n".join(_lacking(group)))
    return "\n\n".join(part.rstrip() for part in parts if part)


def _origin(group: Group, told: Sequence[Result]) -> Iterable[str]:
    """Where and how it was measured; no more of errors, where the verdict has told of them."""
    for result in group.results:
        head = result.head
        versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
        window = f"; windows of {head['seconds']:g} s" if "seconds" in head else ""
        dirty = " with changes that were not committed" if str(head["commit"]).endswith("+") else ""
        commit = f"commit {head['commit']}{dirty}"
        yield f"- {head['started']}: {head['hardware']}, {versions}, {commit}{window}\n\n{_command(head)}\n"
        compared = any(result is other for other in told)
        if result.records and not compared and not any(record.window.get("repeats") for record in result.records):
            yield f"  - {_ONE_WINDOW}"
        if not head.get("std_servers") and any(record.case.system == STD for record in result.records):
            yield f"  - {_STD_ON_ONE}"


def _command(head: Mapping[str, Any]) -> str:
    """To be pasted into a shell, below its bullet."""
    return f"  ```sh\n  {head['command']}\n  ```"


def _lacking(group: Group) -> Iterable[str]:
    """What should have been measured, too."""
    there = {one.case.key for one in group.windows}
    dropped = dict.fromkeys(key for result in group.results for key in result.dropped if key not in there)
    failed = {key: why for result in group.results for key, why in result.failures if key not in there}
    if dropped:
        names = {key: f"*{name}*" for key, name in (group.names | WAYS).items() if name}
        yield f"No time was left for everything. {summary(dropped, [*there, *failed], names)}.\n"
    if len(dropped) > FEW:
        yield f"<details><summary>Their keys</summary>\n\n{', '.join(f'`{key}`' for key in dropped)}\n\n</details>\n"
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
