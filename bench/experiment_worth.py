"""What a report begins with: is token routing worth it, here?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.experiment_case import ITSELF, LARGE
from bench.experiment_compared import system_name
from bench.experiment_group import Group, Measured
from bench.experiment_markdown import WAYS, cell, table
from bench.experiment_rates import tokens
from bench.experiment_result import Result
from bench.experiment_verdict import LEAST_ERROR, Point, sentence, verdict
from trouterd.batching.placement import SHARED

TITLE = "## Is token routing worth it here?"
_READING = (
    "Above 1 pays: *x large only* are token/s by those of the large model that writes everything itself, at the same N. A token"
    " then costs less by as much, unless the pattern's line says otherwise."
)
_OWN = """\
**Which row is yours?** A pattern is p, the share of the small model's steps that hand over (and q, of the large one's that hand
back). Each answer of your own route says it: with v visits, half of the `handoffs` in `usage.route`, p = v / (tokens of the small
model + v) and q = v / tokens of the large one. `trouterctl batching show` has the rates of a running daemon, and
`python -m bench.frontier` the large model's share at every threshold of an algorithm. N is how many requests are under way at once.

**Quality is another question**, and nothing here answers it: how many answers stay right at that p, `python -m bench.frontier`
measures."""
_BY_ITSELF = "**By itself it was not measured: there it can be faster, and these ratios lower"
_KERNEL = ", since the small model has the persistent kernel of their GPU here"


def worth_it(groups: Sequence[Group]) -> tuple[str, list[Result]]:
    """The verdict over all experiments, and the results that it has told the notes of; '' where nothing is compared.

    Args:
        groups: experiments of the same models, placement, hardware and settings are taken together.
    """
    parts, told = [], []
    for results in _together(groups):
        whole = Group(results)
        found = {workload: points for workload in whole.workloads() if (points := verdict(whole, workload))}
        if found:
            heading = f"### {whole.title}; {whole.head['hardware']}"
            blocks = [_block(whole, workload, patterns) for workload, patterns in found.items()]
            every = [point for patterns in found.values() for points in patterns.values() for point in points]
            errors = "\n".join(f"- {line}" for line in _errors(whole, every))
            parts.append("\n\n".join([heading, *notes(results), *blocks, errors]))
            told += results
    if not parts:
        return "", []
    return "\n\n".join([TITLE, _READING, *parts, _OWN]), told


def notes(results: Iterable[Result]) -> list[str]:
    """What is particular to runs; of one command once."""
    letters: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if note := result.head.get("note"):
            letters.setdefault((result.head["started"], note), []).append(result.head["experiment"])
    return [
        f"**Experiment{'s' if len(own) > 1 else ''} {', '.join(own)}, {started}**: {note}"
        for (started, note), own in letters.items()
    ]


def _together(groups: Sequence[Group]) -> list[list[Result]]:
    """Results with windows, the oldest first, by what all of their experiments share; but last of all, where they count, those that
    have the large model alone themselves."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for group in groups:
        key = (*(str(group.head[name]) for name in ("hardware", "pair", "placement")), group.settings)
        found.setdefault(key, []).extend(result for result in group.results if result.records)
    return [
        sorted(results, key=lambda one: (_has_baseline(one), str(one.head["started"])))
        for results in found.values()
        if results
    ]


def _has_baseline(result: Result) -> bool:
    return any(record.case.subject == LARGE for record in result.records)


def _block(group: Group, workload: str, found: Mapping[str, Sequence[Point]]) -> str:
    """Of a workload: baseline, a sentence for each pattern, and its rows."""
    points = [point for own in found.values() for point in own]
    counts = sorted({point.window.case.streams for point in points})
    return "\n\n".join(
        [
            f"Workload `{workload}`. {_baseline(group, points)}",
            "\n".join(f"- {sentence(group.name(subject), own, counts)}" for subject, own in found.items()),
            _rows(group, found).rstrip(),
        ]
    )


def _baseline(group: Group, points: Sequence[Point]) -> str:
    """Which way to serve the large model alone is the fastest, with its token/s."""
    by_way: dict[str, dict[int, float]] = {}
    for large in _fastest(points).values():
        by_way.setdefault(large.case.system, {})[large.case.streams] = large.rate
    ways = [
        f"{system_name(system)} {_listed([cell(rates[count]) for count in sorted(rates)])} token/s at"
        f" N = {_listed([str(count) for count in sorted(rates)])}"
        for system, rates in by_way.items()
    ]
    text = f"Baseline, the large model without routing: {'; '.join(ways)}"
    if any(system.startswith(ITSELF) for system in group.large_systems):
        return f"{text}, the fastest of trouterd's ways to serve it that was measured."
    if _has_all_of_its_gpu(group.head.get("settings", {})):
        return f"{text}; in its turns it has all of its GPU and its persistent kernel, as it would by itself."
    return f"{text}. {_BY_ITSELF}{_KERNEL if group.head['placement'] == SHARED else ''}.**"


def _has_all_of_its_gpu(settings: Mapping[str, object]) -> bool:
    """Whether the large model of these daemons runs as fast as alone."""
    return settings.get("batching.overlap") is False and settings.get(f"models.{LARGE}.megakernel") == "on"


def _fastest(points: Sequence[Point]) -> dict[int, Measured]:
    """By streams the fastest of what was compared with: runs that were put together have a window of their own each."""
    found: dict[int, Measured] = {}
    for large in (point.large for point in points):
        known = found.get(large.case.streams)
        if known is None or large.rate > known.rate:
            found[large.case.streams] = large
    return found


def _listed(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _rows(group: Group, found: Mapping[str, Sequence[Point]]) -> str:
    """Of large only, then of each pattern."""
    cost = f"{group.device}-s / 1,000"
    head = (
        "",
        "B",
        "N",
        "token/s",
        "x large only",
        "from",
        "to",
        "gap p50, ms",
        "p99",
        cost,
        "cost x large only",
        "tokens",
    )
    large = _fastest([point for own in found.values() for point in own])
    rows = [_row(f"large only, {system_name(one.case.system)}", one) for _, one in sorted(large.items())]
    rows += [_row(group.name(subject), point.window, point) for subject, points in found.items() for point in points]
    return table(head, rows, 2)


def _row(name: str, one: Measured, point: Point | None = None) -> Sequence[object]:
    """Of a window, with what it is by large only's."""
    case, ratio = one.case, ("", "", "")
    if point:
        shown = f"**{point.ratio}**" if point.says == "pays" else str(point.ratio)
        ratio = shown, f"{point.low:.2f}", f"{point.high:.2f}"
    return (
        name,
        "" if point is None else "any" if case.streams == 1 else WAYS.get(case.batching, case.batching),
        case.streams,
        one.rate,
        *ratio,
        one.time_of("gap_ms", "p50"),
        one.time_of("gap_ms", "p99"),
        one.of("gpu_seconds_per_1000"),
        point.cost if point else "",
        tokens(one),
    )


def _errors(group: Group, points: Sequence[Point]) -> Iterable[str]:
    """What from and to are, and which differences mean nothing."""
    single = [point for point in points if not point.repeated]
    least = f"{LEAST_ERROR:.0%}"
    if single:
        worst = max(single, key=lambda point: point.error)
        asked, count = group.name(worst.window.case.subject), cell(tokens(worst.window))
        where = f"`{worst.window.case.workload}`, {asked}, N = {worst.window.case.streams}, a window of {count} tokens"
        most = f", and with few tokens it is more: up to {worst.error:.0%} ({where})"
        yield (
            "*from*, *to*: one window each, so that their spread is not known. Taken is what chance does to as many hand-overs as"
            f" the window had (two standard errors of independent draws, an upper bound), and {least} at least, by which single"
            f" windows differ from run to run. **Differences below {least} mean nothing**{most if worst.error > _ABOVE else ''}."
            " `--repeats 3` measures the spread."
        )
    if len(single) < len(points):
        windows = sorted({len(point.window.record.window["repeats"]) for point in points if point.repeated})
        counts, partly = _listed([str(count) for count in windows]), " where there are several" if single else ""
        yield (
            f"*from*, *to*: the lowest of {counts} windows by the highest of large only, and the other way round{partly}."
            " Differences inside of that mean nothing."
        )
    yield (
        "Bold: all that the ratio may be is above 1. Both ratios are at nominal rates where moves were drawn; token/s and"
        f" {group.device}-s as measured. *tokens*: that the figures stand on. *gap*: from one arrival of tokens to the next of an"
        " answer."
    )


_ABOVE = LEAST_ERROR * 1.01
"""Errors that are more than the least one, whatever floats make of it."""
