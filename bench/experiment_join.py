"""Several experiments as one: what they start in the same way is started once, and what they ask for alike is measured once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bench.experiment_case import LARGE, MIDDLE, SMALL, Case, Stage

_ALONE = (SMALL, MIDDLE, LARGE)


def joined(experiments: Mapping[str, Sequence[Stage]]) -> list[Stage]:
    """The stages of all experiments, by letter, in their order: each with a name of its own and no more routes than it may have.

    A window of several experiments is as important as it is to the one that needs it most, and as long as the longest of them.
    """
    found: list[Stage] = []
    for letter, stages in experiments.items():
        for stage in stages:
            own = replace(stage, cases=tuple(replace(case, experiments=(letter,)) for case in stage.cases))
            if known := next((known for known in found if _alike(known, own)), None):
                found[found.index(known)] = _both(known, own)
            else:
                found.append(own)
    return list(_named(part for stage in found for part in _parts(stage)))


def _alike(one: Stage, other: Stage) -> bool:
    """Whether the two start the same, but for their routes."""
    return (one.name, one.daemon) == (other.name, other.daemon)


def _both(one: Stage, other: Stage) -> Stage:
    """One stage of two: models alone come before what is planned by their steps."""
    cases = {case.key: case for case in one.cases}
    for case in other.cases:
        cases[case.key] = _shared(cases[case.key], case) if case.key in cases else case
    order = sorted(cases.values(), key=lambda case: case.subject not in _ALONE)
    return replace(one, cases=tuple(order), routes=one.routes.joined(other.routes))


def _shared(one: Case, other: Case) -> Case:
    """A window that does for both; `seconds` of 0 is the longest."""
    return replace(
        one,
        importance=min(one.importance, other.importance),
        settle=max(one.settle, other.settle),
        prefill=max(one.prefill, other.prefill),
        seconds=max(one.seconds, other.seconds) if one.seconds and other.seconds else 0.0,
        experiments=tuple(dict.fromkeys((*one.experiments, *other.experiments))),
    )


def _parts(stage: Stage) -> Iterator[Stage]:
    """Stages with few routes each; a model alone is measured in the first one. Without a window there is none."""
    parts = stage.routes.parts(stage.most_routes) if stage.most_routes else [stage.routes]
    homes = {name: number for number, part in enumerate(parts) for name in part.names}
    for number, routes in enumerate(parts):
        cases = tuple(case for case in stage.cases if homes.get(stage.routes.of(case.subject), 0) == number)
        if cases:
            yield replace(stage, routes=routes, cases=cases)


def _named(stages: Iterator[Stage]) -> Iterator[Stage]:
    """With a number behind a name that was there before: `trouterd 2`."""
    counts: Counter[str] = Counter()
    for stage in stages:
        counts[stage.name] += 1
        number = counts[stage.name]
        yield replace(stage, name=f"{stage.name} {number}") if number > 1 else stage
