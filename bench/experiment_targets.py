"""What the project aims at on one H200 with Qwen3-0.6B and 32B, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.experiment_group import Group, Measured
from bench.experiment_markdown import WAYS, table
from bench.experiment_peer import VLLM
from bench.experiment_time import spent
from bench.patterns import CITER, COLLM, R2R, R2R_10, RSTITCH, Pattern

PAIR, PLACEMENT, CARD = "Qwen3-0.6B+Qwen3-32B", "shared", "H200"
_WORKLOAD = "low"


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the aims."""

    what: str
    streams: tuple[int, ...]
    first: tuple[float, ...]
    aim: tuple[float, ...]
    measured: Callable[[Group, int], tuple[float, Measured] | None]
    """The figure for so many streams, and the window that it is of."""
    experiments: str = "ac"
    share: bool = False
    """Printed as a percentage."""


def against_large(pattern: Pattern) -> Callable[[Group, int], tuple[float, Measured] | None]:
    """Token/s of the best way to wait, by those of the large model alone."""

    def measured(group: Group, streams: int) -> tuple[float, Measured] | None:
        best = group.best(_WORKLOAD, pattern.key, streams)
        ratio = group.ratio(best) if best else None
        return (ratio.value, best) if best and ratio else None

    return measured


def _against_vllm(group: Group, streams: int) -> tuple[float, Measured] | None:
    best = group.best(_WORKLOAD, R2R.key, streams)
    ratio = group.ratio(best, subject=R2R.key, system=VLLM) if best else None
    return (ratio.value, best) if best and ratio else None


def _grown(group: Group, streams: int) -> tuple[float, Measured] | None:
    """Token/s by those of one stream."""
    best, first = group.best(_WORKLOAD, R2R.key, streams), group.best(_WORKLOAD, R2R.key, 1)
    return (best.rate / first.rate, best) if best and first and first.rate else None


def _kept(group: Group, streams: int) -> tuple[float, Measured] | None:
    grown = _grown(group, streams)
    return (grown[0] / streams, grown[1]) if grown else None


def _long(group: Group, streams: int) -> tuple[float, Measured] | None:
    short, long = (group.best(workload, R2R.key, streams) for workload in (group.workloads() * 2)[:2])
    return (long.rate / short.rate, long) if short and long and short.rate else None


def _of_ideal(group: Group, streams: int) -> tuple[float, Measured] | None:
    best = group.best(_WORKLOAD, R2R.key, streams)
    return (best.of_ideal, best) if best and best.of_ideal is not None else None


_N = (1, 4, 16, 64)
TARGETS = (
    Target("R2R, p = 0.35 / large only", _N, (2.3, 1.9, 1.75, 1.7), (2.6, 2.4, 2.2, 2.1), against_large(R2R)),
    Target("R2R, p = 0.10 / large only", _N, (5, 4, 3.5, 3.3), (7.5, 6, 5.3, 4.9), against_large(R2R_10)),
    Target("CITER, p = 0.135 / large only", _N, (4.5, 3.5, 3.2, 3.0), (5.8, 4.9, 4.4, 4.0), against_large(CITER)),
    Target("Co-LLM, p = 0.54 / large only", _N, (1.55, 1.4, 1.3, 1.25), (1.75, 1.65, 1.55, 1.45), against_large(COLLM)),
    Target("R-Stitch / large only", _N, (1.25, 1.12, 1.06, 1.02), (1.32, 1.25, 1.17, 1.12), against_large(RSTITCH)),
    Target("R2R, p = 0.35 / Std. Serving on vLLM", (4, 16, 64), (3.7, 5.5, 8.5), (4.7, 6.9, 10.8), _against_vllm),
    Target("R2R, N = 1 to 16: token/s x N = 1", (16,), (11,), (13,), _grown),
    Target("R2R, N = 1 to 16: speed of one user kept", (16,), (0.68,), (0.82,), _kept, share=True),
    Target("R2R, answers of 8,192 against 2,048 tokens", (4, 16), (0.95,) * 2, (0.98,) * 2, _long, "g", share=True),
    Target("R2R, p = 0.35: of the ideal bound", _N, (0.75,) * 4, (0.9,) * 4, _of_ideal, share=True),
)


def targets_table(groups: Sequence[Group]) -> str:
    """Of the groups with that pair on one such card; '' where there is none."""
    own = [group for group in groups if _is_meant(group)]
    if not own:
        return ""
    rows = [row for target in TARGETS for row in _rows(target, own)]
    head = ("", "N", "first target", "aim", "measured", "", "B", "what is missing")
    return table(head, rows)


def _is_meant(group: Group) -> bool:
    head = group.head
    return head["pair"] == PAIR and head["placement"] == PLACEMENT and CARD in str(head["hardware"])


def _rows(target: Target, groups: Sequence[Group]) -> Iterable[Sequence[object]]:
    for streams, first, aim in zip(target.streams, target.first, target.aim, strict=True):
        found, group = _best(target, groups, streams)

        def shown(value: float) -> str:
            return f"{value:.0%}" if target.share else f"{value:.3g}"

        if found is None or group is None:
            yield target.what, streams, shown(first), shown(aim), None, "not measured", None, None
            continue
        value, window = found
        verdict = "aim met" if value >= aim else "first met" if value >= first else "**missed**"
        time = spent(group, window) if value < aim else None
        cause = time.cause if time else ""
        way = WAYS.get(window.case.batching, window.case.batching)
        way += f"; {group.settings}" if group.settings else ""
        yield target.what, streams, shown(first), shown(aim), shown(value), verdict, way, cause


def _best(target: Target, groups: Sequence[Group], streams: int) -> tuple[tuple[float, Measured] | None, Group | None]:
    """The figure and its group: of several settings the best one, with each of them the first experiment that has it."""
    found: dict[str, tuple[tuple[float, Measured], Group]] = {}
    for group in groups:
        if group.head["experiment"] not in target.experiments or group.settings in found:
            continue
        if (figure := target.measured(group, streams)) is not None:
            found[group.settings] = figure, group
    return max(found.values(), key=lambda one: one[0][0], default=(None, None))
