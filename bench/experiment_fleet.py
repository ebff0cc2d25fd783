"""The stage of an experiment that is a trouterd: its routes and single models, and how long each of them waits for company."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.ablations import ABLATIONS, without
from bench.deployment import Deployment, Fleet, RouteSpec, serving
from bench.experiment_case import AUTO, EAGER, PLANNED, STD, SYNCHRONOUS, TURNS, WHOLE, Case, CaseError, Measure, Record
from bench.experiment_routes import Routes
from bench.experiment_setup import Setup
from bench.experiment_steps import StepTimes, longer
from bench.patterns import Mixture, Pattern
from bench.std_serving import std_serving_on
from bench.step_synchronous import step_synchronous
from bench.target import Target
from trouterd.batching.launch import clamp
from trouterd.batching.network import Network
from trouterd.batching.plan import plan
from trouterd.batching.predictor import Predictor
from trouterd.batching.row_time import fed

_TURNS = "no async"
"""The ablation that has models take turns."""
SCALED = f"{PLANNED} x "
"""Before the factor of thresholds that are wrong by it."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What plans take contention to be."""

    factors: tuple[float, ...]
    """One per model; empty: none."""
    measured: bool = False
    """What windows have shown goes before it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Thresholds for one number of requests, and what they promise."""

    thresholds: tuple[int, ...]
    tokens_per_second: float | None
    """None where the throughput model cannot judge them."""


class OpenedFleet:
    """A running daemon in an experiment; Std. Serving over its models is started when it is asked for.

    Args:
        fleet: the daemon.
        folder: for files.
        stack: ends what is started later.
        setup: its models.
        routes: that it serves.
        steps: step times of the models alone, as far as they are known by then.
        assumed: for plans.
    """

    def __init__(
        self,
        fleet: Fleet,
        folder: Path,
        stack: ExitStack,
        setup: Setup,
        routes: Routes,
        steps: StepTimes,
        assumed: Assumed,
    ) -> None:
        self._fleet, self._folder, self._stack, self._setup = fleet, folder, stack, setup
        self._routes, self._steps, self._assumed = routes, steps, assumed
        self._std: dict[str, Target] = {}
        self._known: dict[tuple[object, ...], Record] = {}
        """Windows by their thresholds: wrong ones, by several factors, can come to the same."""

    def record(self, case: Case, measure: Measure) -> Record:
        """See `Opened`."""
        self._fleet.wait_ready()
        pattern = self._routes.pattern(case.subject)
        if not case.batching.startswith(PLANNED):
            self._fleet.live("batching.mode", case.batching or EAGER)
            return self._measured(case, pattern, measure, {})
        network, by = self._network(case, pattern)
        found = self._plan(case, network)
        same = case.system, case.workload, case.subject, case.streams, found.thresholds
        if case.batching == PLANNED or same not in self._known:
            self._fleet.pin(dict(zip(self._setup.names, found.thresholds, strict=True)), case.streams)
            facts = {"predicted": found.tokens_per_second, "contention": list(network.contention), "contention_by": by}
            self._known[same] = self._measured(case, pattern, measure, facts)
        known = self._known[same]
        # One window cannot stand for several unless it says so.
        told = known.facts if known.case == case else {**known.facts, "same_as": known.case.batching}
        return replace(known, case=case, facts=told)

    def _measured(
        self, case: Case, pattern: Pattern | Mixture | None, measure: Measure, facts: Mapping[str, Any]
    ) -> Record:
        body = case.body or (pattern.body if pattern else {})
        with self._target(case, pattern) as target:
            window = measure(replace(target, body={**target.body, **body}), case)
            return Record(case, window, {**facts, **self._facts(case)})

    @contextmanager
    def _target(self, case: Case, pattern: Pattern | Mixture | None) -> Iterator[Target]:
        """Who is asked, in the state in which the case wants it."""
        route = self._routes.of(case.subject)
        if case.system == STD:
            yield self._std_serving()[route]
        elif case.system == SYNCHRONOUS:
            writes_on = pattern is not None and pattern.writes_on
            with step_synchronous(self._fleet, route, case.streams, writes_on=writes_on) as target:
                yield target
        elif case.system == TURNS:
            with without(self._fleet, _TURNS):
                yield self._fleet.targets[route]
        elif case.system in ABLATIONS and ABLATIONS[case.system].is_live:
            with without(self._fleet, case.system):
                yield self._fleet.targets[route]
        else:
            yield self._fleet.targets[route]

    def _facts(self, case: Case) -> dict[str, Any]:
        """Thresholds in force, and what the controller makes of it all."""
        shown = self._fleet.call("batching")
        facts: dict[str, Any] = {
            "thresholds": {name: _entry(own["thresholds"], case.streams) for name, own in shown["models"].items()},
        }
        if case.batching == AUTO:
            groups = shown["controller"].get("groups", [])
            facts["controller"] = next((group for group in groups if set(group["models"]) == set(shown["models"])), {})
        return facts

    def _std_serving(self) -> dict[str, Target]:
        """A dispatcher decides without a model's logits, so that no head runs: that is to its advantage."""
        if not self._std:
            routes = routes_of(self._setup, self._routes.patterns, self._folder, heads=False)
            self._std = self._stack.enter_context(std_serving_on(self._fleet, self._folder / "std", routes))
        return self._std

    def _plan(self, case: Case, network: Network) -> Plan:
        factor = float(case.batching.removeprefix(SCALED)) if case.batching.startswith(SCALED) else 1.0
        return planned(network, case.streams, factor)

    def _network(self, case: Case, pattern: Pattern | Mixture | None) -> tuple[Network, str]:
        """What is known of the deployment by now, and where its contention is from."""
        if pattern is None:
            raise CaseError(f"{case.subject} is no pattern with known rates")
        names, factors, by = self._setup.names, self._assumed.factors, "assumed"
        times = self._steps.of(case.workload, names, case.system)
        network = fed(pattern.network([time.decode for time in times], (), self._setup.handoff), times)
        if self._assumed.measured:
            found = self._steps.fit(case.workload, pattern, names)
            more = [found.more.get(name, 0.0) for name in names]
            network = replace(network, step_times=tuple(map(longer, network.step_times, more)))
            if (measured := found.factors(case.system, names)) is not None:
                factors, by = measured, "measured"
        if self._setup.given_contention:
            factors, by = self._setup.given_contention, "given"
        if case.system in (TURNS, WHOLE) or self._setup.takes_turns:
            if network.size > 2:
                raise CaseError(f"thresholds for models that take turns are known for two, not for {network.size}")
            return replace(network, turns=True), "turns"
        return replace(network, contention=factors or network.contention), by


def planned(network: Network, requests: int, factor: float = 1.0) -> Plan:
    """The planner's thresholds, or such that are wrong by a factor, and the tokens/s that the throughput model gives them.

    Args:
        network: of the deployment.
        requests: in flight.
        factor: multiplies thresholds above 1 and that of the slowest model; the result is made feasible.
    """
    best = plan(network, requests).thresholds(requests)
    slowest = network.slowest(requests)
    scaled = [round(one * factor) if one > 1 or place == slowest else 1 for place, one in enumerate(best)]
    thresholds = clamp(scaled, requests)
    predictor = Predictor(network, requests)
    if not predictor.covers(thresholds):
        return Plan(thresholds, None)
    return Plan(thresholds, predictor.steps_per_second(requests, thresholds) * network.tokens_per_step)


def _entry(thresholds: Sequence[int], streams: int) -> int:
    """Of a list in force: after a window there are no requests any more that it could be asked for."""
    return thresholds[min(streams, len(thresholds)) - 1] if thresholds else 1


def routes_of(setup: Setup, patterns: Iterable[Pattern | Mixture], folder: Path, *, heads: bool) -> list[RouteSpec]:
    """One for all patterns that share it."""
    shared = {pattern.route: pattern for pattern in patterns}
    return [setup.route(pattern, folder, heads=heads) for pattern in shared.values()]


@contextmanager
def opened_fleet(
    deployment: Deployment,
    folder: Path,
    setup: Setup,
    routes: Routes,
    steps: StepTimes,
    assumed: Assumed,
    pools: dict[str, int],
) -> Iterator[OpenedFleet]:
    """Serve models together with routes.

    Args:
        deployment: the models, as they are served.
        folder: for everything.
        setup: the same, as they are meant.
        routes: over them.
        steps: see `OpenedFleet`.
        assumed: the same.
        pools: is told the tokens of the models' KV pools.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = routes_of(setup, routes.patterns, folder, heads=True)
    full = replace(deployment, routes=(*routes.others, *drawn))
    with serving(full, folder) as fleet, ExitStack() as stack:
        pools.update({model["name"]: int(model["kv_tokens"]) for model in fleet.call("models")["models"]})
        yield OpenedFleet(fleet, folder, stack, setup, routes, steps, assumed)
