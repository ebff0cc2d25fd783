"""Experiments a, c and g: routing against the large model and against Std. Serving, over algorithms, streams and lengths."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiment_case import STD, SYNCHRONOUS, Case, Stage
from bench.experiment_fleet import AUTO, EAGER, PLANNED
from bench.experiment_itself import by_itself
from bench.experiment_peer import peer
from bench.experiment_scope import REFERENCE, Scope
from bench.patterns import Mixture, Pattern

_WORKLOAD = 100
"""Importance that each further workload costs."""
_PEER = 14


def algorithms(scope: Scope) -> list[Stage]:
    """a: every algorithm on every workload, against the models alone and Std. Serving."""
    counts = scope.counts(1, 4, 16, 64)
    cases: list[Case] = []
    for rank, workload in enumerate(scope.workloads):
        first = _WORKLOAD * rank
        cases += scope.alone(workload, counts, first + REFERENCE)
        for place, pattern in enumerate(scope.patterns):
            cases += routed(scope, workload, pattern, counts, first + 10 + place)
            cases += std_serving(scope, workload, pattern, counts, first + 15 + 5 * place)
        cases += [
            scope.case(workload, scope.patterns[0].key, count, first + 45, system=SYNCHRONOUS)
            for count in counts
            if count > 1
        ]
    stages = [*scope.fleets(cases), *by_itself(scope, cases)]
    return stages if scope.vllm is None else [*stages, peer(scope, scope.vllm, counts, _PEER)]


def scaling(scope: Scope) -> list[Stage]:
    """c: from one stream to many."""
    scope = scope.only(1)
    counts = scope.counts(1, 2, 4, 8, 16, 32, 64, 128)
    workload, pattern = scope.workloads[0], scope.patterns[0]
    cases = [*scope.alone(workload, counts), *routed(scope, workload, pattern, counts, 10)]
    return [*scope.fleets([*cases, *std_serving(scope, workload, pattern, counts, 40)]), *by_itself(scope, cases)]


def lengths(scope: Scope) -> list[Stage]:
    """g: the same requests with long answers; the workloads differ in nothing else."""
    scope = scope.only(1)
    counts = scope.counts(4, 16)
    pattern = scope.patterns[0]
    cases: list[Case] = []
    for workload in scope.workloads:
        cases += scope.alone(workload, counts)
        cases += [
            scope.case(workload, pattern.key, count, 10 + 10 * place, batching=batching)
            for place, batching in enumerate((PLANNED, AUTO))
            for count in counts
            if count > 1 or batching == PLANNED
        ]
        cases += std_serving(scope, workload, pattern, counts, 15)
    return [*scope.fleets(cases), *by_itself(scope, cases)]


def routed(
    scope: Scope, workload: str, pattern: Pattern | Mixture, counts: Sequence[int], importance: int
) -> list[Case]:
    """A pattern with the planner's lists, with the controller's (which has seen it by then), and with none.

    One stream alone never waits, whatever the lists: it is measured once.
    """
    ranks = {PLANNED: 0, AUTO: 10, EAGER: 20}
    return [
        scope.case(workload, pattern.key, count, importance + rank, batching=batching)
        for count in counts
        for batching, rank in ranks.items()
        if count > 1 or batching == PLANNED
    ]


def std_serving(
    scope: Scope, workload: str, pattern: Pattern | Mixture, counts: Sequence[int], importance: int
) -> list[Case]:
    """A pattern by Std. Serving, on the same daemon's models."""
    return [scope.case(workload, pattern.key, count, importance, system=STD) for count in counts]
