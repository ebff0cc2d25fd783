"""What the project aims at on one H200 with Qwen3-0.6B and 32B, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bench.experiment_compared import system_name
from bench.experiment_group import Group, Measured, Ratio, over
from bench.experiment_markdown import WAYS, table
from bench.experiment_peer import VLLM
from bench.experiment_peer import WORKLOAD as PEER_WORKLOAD
from bench.experiment_rates import at_rates, correction, rates
from bench.experiment_time import Spent, spent
from bench.patterns import CITER, COLLM, R2R, R2R_10, RSTITCH, Pattern

PAIR, PLACEMENT, CARD = "Qwen3-0.6B+Qwen3-32B", "shared", "H200"
_WORKLOAD = "low"


@dataclass(frozen=True, slots=True)
class Figure:
    """What was reached."""

    ratio: Ratio
    window: Measured
    nominal: Ratio | None = None
    """The same, had moves been drawn at the rates that they should have; None: there is nothing to correct."""
    cause: Callable[[Spent], str] = lambda time: time.cause
    """What is missing, from where the time goes."""
    against: str = ""
    """Which way to serve the large model alone it is relative to; '' for none of them."""

    @property
    def judged(self) -> float:
        """What is held against a target."""
        return self.nominal.value if self.nominal else self.ratio.value


Choice = Callable[[str, str, int], Measured | None]
"""Of the windows of a workload, a pattern and a number of streams, by how they wait."""


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the aims."""

    what: str
    streams: tuple[int, ...]
    first: tuple[float, ...]
    aim: tuple[float, ...]
    measured: Callable[[Group, int, Choice], Figure | None]
    """The figure for so many streams."""
    experiments: str = "ac"
    """Those that have it, the first one that does counting."""
    share: bool = False
    """Printed as a percentage."""


def against_large(pattern: Pattern) -> Callable[[Group, int, Choice], Figure | None]:
    """Token/s by those of the large model alone, in the fastest way to serve it."""

    def measured(group: Group, streams: int, choice: Choice) -> Figure | None:
        one = choice(_WORKLOAD, pattern.key, streams)
        large = group.best_large(one) if one else None
        if one is None or large is None or (ratio := over(one, large)) is None:
            return None
        return Figure(ratio, one, at_rates(group, one, ratio), against=system_name(large.case.system))

    return measured


def _against_vllm(group: Group, streams: int, choice: Choice) -> Figure | None:
    one = choice(PEER_WORKLOAD, R2R.key, streams)
    ratio = group.ratio(one, subject=R2R.key, system=VLLM) if one else None
    return Figure(ratio, one, at_rates(group, one, ratio)) if one and ratio else None


def _grown(group: Group, streams: int, choice: Choice) -> Figure | None:
    """Token/s by those of one stream."""
    return _between(group, choice(_WORKLOAD, R2R.key, streams), choice(_WORKLOAD, R2R.key, 1))


def _kept(group: Group, streams: int, choice: Choice) -> Figure | None:
    grown = _grown(group, streams, choice)
    if grown is None:
        return None
    nominal = grown.nominal.times(1 / streams) if grown.nominal else None
    return replace(grown, ratio=grown.ratio.times(1 / streams), nominal=nominal)


def _long(group: Group, streams: int, choice: Choice) -> Figure | None:
    short, long = (choice(workload, R2R.key, streams) for workload in (group.workloads() * 2)[:2])
    return _between(group, long, short)


def _between(group: Group, one: Measured | None, other: Measured | None) -> Figure | None:
    """Of two windows whose moves are drawn."""
    ratio = over(one, other)
    if one is None or other is None or ratio is None:
        return None
    factors = correction(group, one), correction(group, other)
    return Figure(ratio, one, ratio.times(factors[0] / factors[1]) if factors[0] and factors[1] else None)


def _of_ideal(group: Group, streams: int, choice: Choice) -> Figure | None:
    """The bound is that of the window's own moves."""
    del group
    one = choice(_WORKLOAD, R2R.key, streams)
    if one is None or one.of_ideal is None:
        return None
    return Figure(Ratio(one.of_ideal, same_run=True), one, cause=lambda time: time.waited)


_N = (1, 4, 16, 64)
TARGETS = (
    Target("R2R, p = 0.35 / large only", _N, (2.3, 1.9, 1.75, 1.7), (2.6, 2.4, 2.2, 2.1), against_large(R2R)),
    Target("R2R, p = 0.10 / large only", _N, (5, 4, 3.5, 3.3), (7.5, 6, 5.3, 4.9), against_large(R2R_10)),
    Target("CITER, p = 0.135 / large only", _N, (4.5, 3.5, 3.2, 3.0), (5.8, 4.9, 4.4, 4.0), against_large(CITER)),
    Target("Co-LLM, p = 0.54 / large only", _N, (1.55, 1.4, 1.3, 1.25), (1.75, 1.65, 1.55, 1.45), against_large(COLLM)),
    Target("R-Stitch / large only", _N, (1.25, 1.12, 1.06, 1.02), (1.32, 1.25, 1.17, 1.12), against_large(RSTITCH)),
    Target("R2R, p = 0.35 / Std. Serving on vLLM", (4, 16, 64), (3.7, 5.5, 8.5), (4.7, 6.9, 10.8), _against_vllm),
    Target("R2R, N = 1 to 16: token/s x N = 1", (16,), (11,), (13,), _grown, "ca"),
    Target("R2R, N = 1 to 16: speed of one user kept", (16,), (0.68,), (0.82,), _kept, "ca", share=True),
    Target("R2R, answers of 8,192 against 2,048 tokens", (4, 16), (0.95,) * 2, (0.98,) * 2, _long, "g", share=True),
    Target("R2R, p = 0.35: of the ideal bound", _N, (0.75,) * 4, (0.9,) * 4, _of_ideal, share=True),
)


def targets_table(groups: Sequence[Group]) -> str:
    """Of the groups with that pair on one such card; '' where there is none."""
    own = [group for group in groups if _is_meant(group)]
    if not own:
        return ""
    rows = [row for target in TARGETS for row in _rows(target, own)]
    head = (
        *("", "N", "first target", "aim", "measured", "B", "large only", "drawn", "at nominal rates", ""),
        *("learned B", "what is missing"),
    )
    return table(head, rows)


def _is_meant(group: Group) -> bool:
    head = group.head
    return head["pair"] == PAIR and head["placement"] == PLACEMENT and CARD in str(head["hardware"])


def _rows(target: Target, groups: Sequence[Group]) -> Iterable[Sequence[object]]:
    for streams, first, aim in zip(target.streams, target.first, target.aim, strict=True):
        goals = (f"{first:.0%}", f"{aim:.0%}") if target.share else (f"{first:.3g}", f"{aim:.3g}")
        found, group = _best(target, groups, streams)
        if group is None or found is None:
            yield target.what, streams, *goals, None, None, None, None, None, "not measured", None, None
            continue
        learned = target.measured(group, streams, group.learned)
        window = found.window
        time = spent(group, window) if found.judged < aim else None
        way = WAYS.get(window.case.batching, window.case.batching)
        yield (
            target.what,
            streams,
            *goals,
            _told(target, found.ratio) + _spread(target, found),
            f"{way}; {group.settings}" if group.settings else way,
            found.against or None,
            rates(window),
            _told(target, found.nominal) if found.nominal else None,
            "aim met" if found.judged >= aim else "first met" if found.judged >= first else "**missed**",
            _told(target, learned.ratio) if learned else None,
            found.cause(time) if time else "",
        )


def _best(target: Target, groups: Sequence[Group], streams: int) -> tuple[Figure | None, Group | None]:
    """The figure and its group: of several settings the best one, with each of them the first experiment that has it."""
    found: dict[str, tuple[Figure, Group]] = {}
    own = [group for letter in target.experiments for group in groups if group.head["experiment"] == letter]
    for group in own:
        if group.settings in found:
            continue
        if (figure := target.measured(group, streams, group.best)) is not None:
            found[group.settings] = figure, group
    return max(found.values(), key=lambda one: one[0].judged, default=(None, None))


def _spread(target: Target, figure: Figure) -> str:
    """Of the window's repeats, what it is relative to being one window or the mean of several."""
    if figure.window.spread is None:
        return ""
    low, high = (
        _told(target, figure.ratio.times(rate / figure.window.rate)).removesuffix(figure.ratio.mark)
        for rate in figure.window.spread
    )
    return f" ({low} to {high})"


def _told(target: Target, ratio: Ratio) -> str:
    return f"{ratio.value:.0%}{ratio.mark}" if target.share else f"{ratio.value:.3g}{ratio.mark}"
