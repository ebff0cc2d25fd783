"""Experiments a, c and g: routing against the large model and against Std. Serving, over algorithms, streams and lengths.

What is dropped first for lack of time: a further number of streams costs more importance than a further algorithm, so that each is
measured at the first numbers before any is at all of them, and always together with the models alone at that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.experiment_case import AUTO, EAGER, PLANNED, STD, SYNCHRONOUS, Case, Stage
from bench.experiment_itself import by_itself
from bench.experiment_peer import WORKLOAD, known, peer
from bench.experiment_scope import Scope
from bench.patterns import Mixture, Pattern

_WORKLOAD = 100
"""Importance that each further workload costs."""
_COUNT, _PATTERN = 8, 2
"""The same for numbers of streams, and for algorithms; of windows by plan."""
_RANKS = {PLANNED: 2, AUTO: 12, EAGER: 22}
_STD, _STD_PATTERN = 6, 8
_SYNCHRONOUS = 26
_PEER = 12
_MANY = 4
"""What a number of streams costs where there are many of them."""


def algorithms(scope: Scope) -> list[Stage]:
    """a: every algorithm on every workload, against the models alone and Std. Serving."""
    counts = scope.counts(16, 1, 4, 64)
    cases: list[Case] = []
    for rank, workload in enumerate(scope.workloads):
        own = scope.alone(workload, counts, _COUNT)
        for place, pattern in enumerate(scope.patterns):
            own += routed(scope, workload, pattern, counts, _PATTERN * place)
            own += std_serving(scope, workload, pattern, counts, _STD_PATTERN * place)
        own += [
            scope.case(workload, scope.patterns[0].key, count, _SYNCHRONOUS + _COUNT * place, system=SYNCHRONOUS)
            for place, count in enumerate(counts)
            if count > 1
        ]
        cases += [replace(case, importance=case.importance + _WORKLOAD * rank) for case in own]
    if scope.vllm is None:
        return [*scope.fleets(cases), *by_itself(scope, cases)]
    # The peer's load differs from every workload: ours has its like, for this row alone.
    counts = tuple(count for count in counts if count > 1)
    like = scope.alone(WORKLOAD, counts, _COUNT)
    like += [case for pattern in known(scope) for case in routed(scope, WORKLOAD, pattern, counts, 0, (PLANNED,))]
    return [*scope.fleets([*cases, *like]), *by_itself(scope, cases), peer(scope, scope.vllm, counts, _PEER)]


def scaling(scope: Scope) -> list[Stage]:
    """c: from one stream to many."""
    scope = scope.only(1)
    counts = scope.counts(16, 1, 64, 4, 128, 32, 8, 2)
    workload, pattern = scope.workloads[0], scope.patterns[0]
    cases = [*scope.alone(workload, counts, _MANY), *routed(scope, workload, pattern, counts, 0, rank=_MANY)]
    cases += std_serving(scope, workload, pattern, counts, 0, rank=_MANY)
    return [*scope.fleets(cases), *by_itself(scope, cases)]


def lengths(scope: Scope) -> list[Stage]:
    """g: the same requests with long answers; the workloads differ in nothing else."""
    scope = scope.only(1)
    counts = scope.counts(16, 4)
    pattern = scope.patterns[0]
    cases: list[Case] = []
    for workload in scope.workloads:
        cases += scope.alone(workload, counts, _COUNT)
        cases += routed(scope, workload, pattern, counts, 0, (PLANNED, AUTO))
        cases += std_serving(scope, workload, pattern, counts, 0)
    return [*scope.fleets(cases), *by_itself(scope, cases)]


def routed(
    scope: Scope,
    workload: str,
    pattern: Pattern | Mixture,
    counts: Sequence[int],
    importance: int,
    ways: Sequence[str] = tuple(_RANKS),
    *,
    rank: int = _COUNT,
) -> list[Case]:
    """A pattern with the planner's lists, with the controller's (which has seen it by then), and with none.

    One stream alone never waits, whatever the lists: it is measured once.

    Args:
        scope: of the experiment.
        workload: of the windows.
        pattern: the routing.
        counts: streams, the important ones first.
        importance: beside that of the ways and of the counts.
        ways: to wait.
        rank: what each further number of streams costs in importance.
    """
    return [
        scope.case(workload, pattern.key, count, importance + _RANKS[way] + rank * place, batching=way)
        for place, count in enumerate(counts)
        for way in ways
        if count > 1 or way == PLANNED
    ]


def std_serving(
    scope: Scope,
    workload: str,
    pattern: Pattern | Mixture,
    counts: Sequence[int],
    importance: int,
    *,
    rank: int = _COUNT,
) -> list[Case]:
    """A pattern by Std. Serving."""
    return [
        scope.case(workload, pattern.key, count, importance + _STD + rank * place, system=STD)
        for place, count in enumerate(counts)
    ]
