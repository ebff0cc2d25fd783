"""Experiment f: both models on one card, under MPS with limits and without MPS, or each on its own; what it does to the tail."""

from __future__ import annotations

from collections.abc import Sequence

from bench.ablations import ablated
from bench.deployment import Deployment
from bench.experiment_case import TROUTERD, Case, Stage
from bench.experiment_fleet import EAGER, PLANNED
from bench.experiment_scope import REFERENCE, Scope
from trouterd.batching.placement import SHARED

LIMITS = (90, 80, 70, 60)
"""Percent of the multiprocessors that the large model may use at once."""
_TIME_SLICES = (1.0, 1.0)


def stages(scope: Scope) -> list[Stage]:
    """One daemon per way of sharing; on GPUs of their own, or on none, there is only one."""
    scope = scope.only(1)
    found = [scope.fleet(_cases(scope, TROUTERD, REFERENCE))]
    if scope.setup.placement != SHARED:
        return found
    for rank, percent in enumerate(LIMITS):
        limited = scope.setup.deployment(large_settings=(f"sm_percent = {percent}",))
        found.append(_stage(scope, f"large at {percent} %", 10 + rank, limited))
    without = ablated(scope.setup.deployment(), "no MPS")
    contention = _TIME_SLICES if len(scope.setup.names) == len(_TIME_SLICES) else None
    found.append(_stage(scope, "no MPS", 5, without, contention))
    return found


def _stage(
    scope: Scope, name: str, importance: int, deployment: Deployment, contention: Sequence[float] | None = None
) -> Stage:
    cases = _cases(scope, name, importance)
    return scope.fleet(cases, name=name, deployment=deployment, contention=contention)


def _cases(scope: Scope, system: str, importance: int) -> list[Case]:
    workload, counts = scope.workloads[0], scope.counts(1, 4, 16, 64)
    cases = scope.alone(workload, counts, importance, system)
    for count in counts:
        tries = (PLANNED, EAGER) if count > 1 else (PLANNED,)
        cases += [
            scope.case(workload, scope.patterns[0].key, count, importance + 1, system=system, batching=batching)
            for batching in tries
        ]
    return cases
