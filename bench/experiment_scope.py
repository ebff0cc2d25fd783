"""What all experiments have in common: whom they ask, how often, and the windows that every comparison needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.deployment import Deployment, RouteSpec
from bench.experiment_case import AUTO, LARGE, SMALL, STD, TROUTERD, Case, Opened, Stage
from bench.experiment_fleet import Assumed, opened_fleet
from bench.experiment_routes import Routes
from bench.experiment_servers import opened_servers
from bench.experiment_setup import CPU, Setup
from bench.experiment_steps import StepTimes
from bench.patterns import Mixture, Pattern
from bench.workloads import find

REFERENCE = 0
"""Importance of what everything is compared with."""
_START = {CPU: 5.0}
_GPU_START = 45.0
"""Seconds that a daemon needs to start and to end."""
_PREFILL_RATE = 9000.0
"""Tokens per second of a GPU: Qwen3-32B on an H200 takes 57 ms for 512."""
_ALONE_SECONDS, _STEPS_SECONDS, _ALONE_SETTLE = 10.0, 3.0, 1.0
"""Most of a window of the large model alone, and of one that only gives step times: their steps are all alike."""
_MOST_ROUTES = 3
"""Of one daemon: a device captures whole steps for so many, and runs those of more in parts, which costs some launches."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What the command line says of an experiment."""

    setup: Setup
    workloads: tuple[str, ...]
    """Empty on the command line: the experiment's own."""
    streams: tuple[int, ...]
    """Empty: the experiment's own."""
    patterns: tuple[Pattern | Mixture, ...]
    settle: float
    """Seconds of load before a window."""
    learn: float
    """The same where the controller has to learn first."""
    steps: StepTimes = field(default_factory=StepTimes)
    vllm: Path | None = None
    """The peer's scripts."""
    daemon_start: float = 0.0
    """Seconds that a daemon takes to start and to end; 0: what is usual."""
    own_servers: bool = True
    """Std. Serving on servers of its own; False: on the routed daemon's models, whose one api process takes every call."""
    pools: dict[str, int] = field(default_factory=dict)
    """Tokens of the models' KV pools in the routed daemon, once it has run."""

    @property
    def start(self) -> float:
        """Seconds that a daemon takes."""
        return self.daemon_start or _START.get(self.setup.placement, _GPU_START)

    def counts(self, *own: int) -> tuple[int, ...]:
        """Numbers of streams: those of the command line, or the experiment's own."""
        return self.streams or own

    def only(self, patterns: int) -> Scope:
        """With the first patterns alone."""
        return replace(self, patterns=self.patterns[:patterns])

    def case(
        self,
        workload: str,
        subject: str,
        streams: int,
        importance: int,
        *,
        system: str = TROUTERD,
        batching: str = "",
        body: Mapping[str, Any] | None = None,
        changed: tuple[str, ...] = (),
    ) -> Case:
        """One window."""
        prefill, alone = self._prefill(workload, streams), subject in self.setup.names
        return Case(
            system=system,
            workload=workload,
            subject=subject,
            streams=streams,
            batching=batching,
            body=body or {},
            changed=changed,
            importance=importance,
            # A route's first tokens come before its large model has read a prompt: that is at the first visit of each request.
            settle=(self.learn if batching == AUTO else self.settle) + (0.0 if alone else prefill),
            prefill=prefill if alone else 0.0,
        )

    def _prefill(self, workload: str, streams: int) -> float:
        """Seconds of all first prompts, which hold half of an answer in the mean; 0 where no model is on a GPU."""
        if self.setup.placement == CPU:
            return 0.0
        return streams * find(workload).under_way / _PREFILL_RATE

    def alone(self, workload: str, streams: Sequence[int], rank: int = 0) -> list[Case]:
        """Each model alone: what routing is compared with, and step times for the planner.

        Args:
            workload: of the windows.
            streams: the important ones first.
            rank: what each further number of streams costs in importance.
        """
        found = []
        for name in (LARGE, *self.setup.names[1:-1], SMALL):
            for place, count in enumerate(streams):
                case = self.case(workload, name, count, REFERENCE + rank * place)
                seconds = _ALONE_SECONDS if name == LARGE else _STEPS_SECONDS
                found.append(replace(case, seconds=seconds, settle=min(case.settle, _ALONE_SETTLE)))
        return found

    def fleets(self, cases: Sequence[Case]) -> list[Stage]:
        """A daemon for the windows, and Std. Serving beside it where it has servers of its own."""
        apart = [case for case in cases if case.system == STD and self.own_servers]
        fleet = self.fleet([case for case in cases if case not in apart])
        if not apart:
            return [fleet]
        servers = self.setup.deployment()
        return [fleet, Stage(STD, self.start, self._open_servers, tuple(apart), servers, Routes(self.patterns))]

    def _open_servers(self, folder: Path, routes: Routes) -> AbstractContextManager[Opened]:
        return opened_servers(self.setup, folder, routes.patterns, self.pools)

    def fleet(
        self,
        cases: Sequence[Case],
        *,
        name: str = TROUTERD,
        deployment: Deployment | None = None,
        others: Sequence[RouteSpec] = (),
        contention: Sequence[float] | None = None,
        measured: bool = False,
    ) -> Stage:
        """The stage that is one trouterd with the routes of all patterns.

        Args:
            cases: of it.
            name: of the stage.
            deployment: default: the models as they are.
            others: routes beside those of the patterns.
            contention: what plans take it to be; None: what is known of the placement.
            measured: plans go by the contention of the windows before, as soon as these tell it.
        """
        served = self.setup.deployment() if deployment is None else deployment
        assumed = Assumed(self.setup.contention if contention is None else tuple(contention), measured)
        # Std. Serving is to have the pools of the models as they are.
        pools = self.pools if deployment is None else {}

        def start(folder: Path, routes: Routes) -> AbstractContextManager[Opened]:
            return opened_fleet(served, folder, self.setup, routes, self.steps, assumed, pools)

        routes = Routes(self.patterns, tuple(others))
        return Stage(name, self.start, start, tuple(cases), (served, assumed), routes, _MOST_ROUTES)
