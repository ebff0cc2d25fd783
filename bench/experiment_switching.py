"""Experiment d: the price of one hand-off, by switching after every n tokens."""

from __future__ import annotations

from bench.deployment import RouteSpec
from bench.experiment_case import AUTO, EAGER, LARGE, SMALL, Stage
from bench.experiment_itself import by_itself
from bench.experiment_scope import Scope

EVERY = (1, 2, 4, 8, 16, 32, 64)
ROUTE = "every"


def stages(scope: Scope) -> list[Stage]:
    """The large model writes one token after n - 1 of the small one's, for each n, against the large model alone.

    Requests switch at times of their own: in step with each other they would need no delayed batching, and have the best one.
    """
    scope = scope.only(0)
    workload = scope.workloads[0]
    cases = scope.alone(workload, counts := scope.counts(1, 16))
    for count in counts:
        for rank, every in enumerate(EVERY):
            body = {"route": {"params": {"n": every}}}
            for batching in (EAGER, AUTO) if count > 1 else (EAGER,):
                subject, importance = f"{ROUTE}:{every}", 10 + rank + 10 * (batching == AUTO)
                cases.append(scope.case(workload, subject, count, importance, batching=batching, body=body))
    route = RouteSpec(ROUTE, (SMALL, LARGE), "every_n", f'shape = "visit", n = {max(EVERY)}, phases = "seed"')
    return [scope.fleet(cases, others=[route]), *by_itself(scope, cases)]
