"""Experiment b: what each part of the engine is worth, one left out at a time."""

from __future__ import annotations

from bench.ablations import ABLATIONS, ablated
from bench.experiment_case import EAGER, PLANNED, SYNCHRONOUS, TROUTERD, Case, Stage
from bench.experiment_scope import Scope
from bench.experiment_setup import CPU
from trouterd.batching.placement import SHARED

_EAGER, _MPS = "no delayed batching", "no MPS"


def stages(scope: Scope) -> list[Stage]:
    """The whole, and what can be left out of a running daemon, on one; a daemon for each of the others.

    Thresholds are the whole's everywhere, so that nothing else differs.
    """
    scope = scope.only(1)
    counts = scope.counts(1, 4, 8, 16)
    cases = scope.alone(scope.workloads[0], counts)
    cases += [*_cases(scope, TROUTERD, 1), *_cases(scope, SYNCHRONOUS, 3)]
    apart: list[Stage] = []
    for rank, (name, ablation) in enumerate(ABLATIONS.items()):
        if ablation.is_live:
            cases += _cases(scope, name, 2)
        elif _has(scope.setup.placement, name):
            deployment = ablated(scope.setup.deployment(), name)
            apart.append(scope.fleet(_cases(scope, name, 10 + rank), name=name, deployment=deployment))
    return [scope.fleet(cases), *apart]


def _has(placement: str, part: str) -> bool:
    """Whether there is anything to leave out: graphs and steps ahead are a GPU's, MPS a shared one's."""
    return placement == SHARED if part == _MPS else placement != CPU


def _cases(scope: Scope, system: str, importance: int) -> list[Case]:
    """The first pattern, waiting as planned unless waiting is what is left out."""
    batching = {_EAGER: EAGER, SYNCHRONOUS: ""}.get(system, PLANNED)
    workload, pattern = scope.workloads[0], scope.patterns[0]
    return [
        scope.case(workload, pattern.key, count, importance, system=system, batching=batching)
        for count in scope.counts(1, 4, 8, 16)
    ]
