"""Experiment e: what it costs when B is wrong."""

from __future__ import annotations

from bench.experiment_case import EAGER, PLANNED, Stage
from bench.experiment_fleet import SCALED
from bench.experiment_scope import Scope

FACTORS = (0.25, 0.5, 2.0, 4.0)
_MOST_PATTERNS = 2


def stages(scope: Scope) -> list[Stage]:
    """The planner's thresholds above 1, and the same times each factor, as far as they can be reached at all."""
    scope = scope.only(_MOST_PATTERNS)
    counts = scope.counts(4, 16, 64)
    workload = scope.workloads[0]
    cases = scope.alone(workload, counts)
    for place, pattern in enumerate(scope.patterns):
        for count in counts:
            tries = [(PLANNED, 1), (EAGER, 2), *((f"{SCALED}{factor:g}", 3) for factor in FACTORS)]
            cases += [
                scope.case(workload, pattern.key, count, rank + 10 * place, batching=batching)
                for batching, rank in tries
                if count > 1
            ]
    return [scope.fleet(cases)]
