"""The controller on simulated daemons whose true parameters are known: it finds their plan, and behaves when it cannot."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from tests.batching.loads import load, paper_pair
from trouterd.batching import controller as controller_module
from trouterd.batching import state
from trouterd.batching import trials as trials_module
from trouterd.batching.controller import MOST, WAITING, Controller, Kept
from trouterd.batching.estimate import ENOUGH, ENOUGH_HANDOFFS, Estimator, Learned
from trouterd.batching.groups import Group, fingerprint, groups_of
from trouterd.batching.launch import feasible
from trouterd.batching.network import Network, StepTime
from trouterd.batching.plan import BatchingPlan, plan
from trouterd.batching.policies import constant
from trouterd.batching.predictor import Predictor
from trouterd.batching.replay import RunWorkload, best, geometric
from trouterd.batching.report import Report, Step
from trouterd.batching.simulator import simulate
from trouterd.batching.trials import FREEZE, HOLD, LONGEST_WATCH, TRY, Load
from trouterd.batching.workload import MarkovWorkload
from trouterd.config import Batching, Config, Gpu, Model, Route, Server

NAMES = ("small", "large")


def group(*, shares: bool = False) -> Group:
    return Group(NAMES, (0, 1), (shares, shares), 256)


@dataclass
class Daemon:
    """Makes the reports that workers would make, from a network's true parameters."""

    network: Network
    active: int
    rate: float = 1000.0
    """Requests' steps a second, all models together."""
    seed: int = 0
    now: float = 100.0
    decisions: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    moves: list[Counter[int]] = field(default_factory=lambda: [Counter(), Counter()])
    runs: list[Counter[int]] = field(default_factory=lambda: [Counter(), Counter()])
    overlap: bool = False
    version: int = 0
    since: list[float] = field(default_factory=lambda: [1.0, 2.0])
    prompts: tuple[float, float] = (0.0, 0.0)
    """Shares of the models' time that go into prompts; no step of others is made while the one with the most is busy with them."""
    prompt_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)

    def reports(self, seconds: float = 1.0) -> dict[str, Report]:
        """One second later."""
        self.now += seconds
        found = {}
        for model, name in enumerate(NAMES):
            count = int(self.rate * (1 - max(self.prompts)) * seconds * self.network.shares[model])
            self.prompt_seconds[model] += self.prompts[model] * seconds
            leaving = self.dice.binomial(count, self.network.routing[model][1 - model])
            self.decisions[model] += count
            self.moves[model][1 - model] += int(leaving)
            kept = self.network.commit[model][1 - model]
            self.tokens[model] += count - leaving + int(kept * leaving)
            share = max(leaving / max(count, 1), 1e-9)
            self.runs[model].update(self.dice.geometric(share, leaving).tolist())
            found[name] = Report(
                now=self.now,
                since=self.since[model],
                active=self.active,
                version=self.version,
                tokens=self.tokens[model],
                decisions=self.decisions[model],
                moves=dict(self.moves[model]),
                runs=dict(self.runs[model]),
                steps=self._steps(model),
                prompt_seconds=self.prompt_seconds[model],
            )
        return found

    def restart(self, model: int) -> None:
        """Its worker dies and comes back."""
        self.since[model] = self.now
        self.decisions[model] = self.tokens[model] = 0
        self.prompt_seconds[model] = 0.0
        self.moves[model].clear()
        self.runs[model].clear()

    def _steps(self, model: int) -> list[Step]:
        """Of one second. With `overlap`: 0.2 s together, 0.1 s small alone, 0.1 s large alone, and so on."""
        phases = [(0.2, (0, 1)), (0.1, (0,)), (0.1, (1,))] if self.overlap else [(0.4, (0, 1))]
        steps, start = [], self.now - 1.0
        for length, who in phases * 2:
            begin = start
            while model in who:
                batch = int(self.dice.integers(1, 9))
                factor = self.network.contention[model] * (len(who) - 1)
                seconds = self.network.step_times[model].of(batch) * (1 + factor) * float(self.dice.uniform(0.98, 1.02))
                if begin + seconds > start + length:
                    break
                steps.append(Step(begin, seconds, batch))
                begin += seconds
            start += length
        return steps


def run(controller: Controller, daemon: Daemon, seconds: int) -> None:
    for second in range(seconds):
        controller.observe(daemon.reports())
        if second % 5 == 4:
            controller.recompute(daemon.now)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other choice is tried every 100 s, so that no test has to go through hours."""
    assert HOLD <= 0.02 * TRY
    monkeypatch.setattr(trials_module, "TRY", 100.0)
    monkeypatch.setattr(trials_module, "LONGEST", 400.0)


@pytest.mark.parametrize("active", [4, 8, 16])
def test_it_finds_the_plan_of_the_true_parameters(active: int) -> None:
    network = paper_pair()
    controller = Controller(group())
    run(controller, Daemon(network, active), 30)
    truth = plan(network, active)
    found = [controller.lists[name][active - 1] for name in NAMES]
    predictor = Predictor(network, active)
    steps = predictor.steps_per_second(active, found)
    assert steps == pytest.approx(predictor.steps_per_second(active, truth.thresholds(active)), rel=0.02)
    assert found[1] > 1
    assert controller.predicted == pytest.approx(truth.predicted[active - 1], rel=0.05)
    assert controller.ideal >= controller.predicted
    for n in range(1, len(controller.lists["small"]) + 1):
        assert feasible([controller.lists[name][n - 1] for name in NAMES], n)
    assert controller.lists["large"][0] == 1
    assert controller.lingers["large"] == pytest.approx(4 * 27.9e-3, rel=0.1)


def test_models_that_take_turns_get_a_plan_for_turns() -> None:
    network = replace(paper_pair(), turns=True)
    controller = Controller(group())
    controller.turns = True
    run(controller, Daemon(network, 8), 10)
    truth = plan(network, 8)
    found = [controller.lists[name][7] for name in NAMES]
    steps = Predictor(network, 8).steps_per_second(8, found)
    assert steps == pytest.approx(truth.predicted[7] / network.tokens_per_step, rel=0.02)
    assert controller.predicted == pytest.approx(truth.predicted[7], rel=0.05)
    controller.turns = False
    controller.recompute(110.0)
    assert controller.network is not None
    assert not controller.network.turns


def test_what_models_side_by_side_reach_is_not_compared_with_turns() -> None:
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    while controller.state != "watching the latest change":
        run(controller, daemon, 5)
    controller.turns = True
    assert controller.measured(daemon.now) == Load()
    daemon.rate /= 4
    run(controller, daemon, 60)
    assert controller.trust == 1.0
    assert controller.state == "settled"
    controller.turns = True
    assert controller.measured(daemon.now).rate > 0


def test_replays_of_models_side_by_side_say_nothing_of_turns() -> None:
    controller = Controller(group())
    run(controller, Daemon(paper_pair(), 8), 10)
    controller._chosen, controller._replayed, controller._rates = {"small": [1]}, 1e9, {(8, (1, 1)): 1.0}
    controller.turns = True
    assert (controller._chosen, controller._rates) == ({}, {})
    assert controller._replayed < 0


def test_tokens_of_an_outage_are_no_throughput() -> None:
    """The small model writes on alone while the large one is away: nothing of it is compared with anything."""
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    while controller.state != "watching the latest change":
        run(controller, daemon, 5)
    lists, before = controller.lists, len(controller._samples)
    for second in range(40):
        daemon.rate = 5000.0
        controller.observe({"small": daemon.reports()["small"]})
        if second % 5 == 4:
            controller.recompute(daemon.now)
    assert len(controller._samples) == before
    assert controller.measured(daemon.now) == Load()
    daemon.rate = 1000.0
    daemon.restart(1)
    run(controller, daemon, 40)
    assert controller.lists == lists
    assert controller.trust == pytest.approx(1.0, abs=0.15)
    assert controller.state == "settled"


def test_nothing_is_planned_while_a_model_is_away() -> None:
    controller, daemon = Controller(group(), Kept(trust=0.5)), Daemon(paper_pair(), 64)
    run(controller, daemon, 30)
    assert controller.state == "settled"
    lists = controller.lists
    for second in range(90):
        controller.observe({"small": daemon.reports()["small"]})
        if second % 5 == 4:
            controller.recompute(daemon.now)
        assert controller.lists == lists
    assert controller.state == "nothing to measure"
    daemon.restart(1)
    run(controller, daemon, 10)
    assert controller.state == "settled"


def test_small_promises_of_waiting_are_not_worth_a_change() -> None:
    waits = {}
    for share in (0.25, 0.35):
        network = Network.pair((StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)), share)
        predictor, planned = Predictor(network, 8), plan(network, 8).thresholds(8)
        promise = predictor.steps_per_second(8, planned) / predictor.steps_per_second(8, (1, 1)) - 1
        assert promise > 0.02
        controller = Controller(group())
        run(controller, Daemon(network, 8), 30)
        waits[promise > WAITING] = any(max(values) > 1 for values in controller.lists.values())
    assert waits == {True: True, False: False}


@pytest.mark.parametrize("reliable", [True, False])
def test_what_is_promised_too_little_is_tried_soon(monkeypatch: pytest.MonkeyPatch, reliable: bool) -> None:
    """Two models here, so that the daemon's true parameters are at hand; of three that slow each other down it is so by itself."""
    monkeypatch.setattr(Predictor, "reliable", property(lambda _: reliable))
    network = Network.pair((StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)), 0.25)
    controller, daemon = Controller(group()), Daemon(network, 8)
    tried = False
    for _ in range(9):
        run(controller, daemon, 5)
        waits = any(max(values) > 1 for values in controller.lists.values())
        tried = tried or controller.state == "trying the other choice"
        daemon.rate = 1170.0 if waits else 1000.0
    assert tried is not reliable
    run(controller, daemon, 30)
    assert any(max(values) > 1 for values in controller.lists.values()) is not reliable


def test_eager_stays_where_waiting_gains_nothing() -> None:
    controller = Controller(group())
    network = Network.pair((StepTime.affine(1e-3, 1e-5), StepTime.affine(8e-3, 5e-5)), 1 / 19)
    run(controller, Daemon(network, 8, rate=3000), 30)
    assert not controller.lists
    assert controller.state == "settled"


def test_there_is_a_state_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, seen = Controller(group()), []

    def watched(network: Network, concurrency: int, max_batch: int | None = None) -> BatchingPlan:
        seen.append(controller.state)
        return plan(network, concurrency, max_batch)

    monkeypatch.setattr(controller_module, "plan", watched)
    run(controller, Daemon(paper_pair(), 8), 60)
    assert len(seen) > 1
    assert all(seen), "trouterctl top reads it meanwhile"


def test_step_times_routing_and_commits_are_those_of_the_daemon() -> None:
    network = Network.pair((StepTime.affine(6e-3, 1e-4), StepTime.affine(28e-3, 5e-4)), 0.35, 0.8)
    estimator, daemon = Estimator(group()), Daemon(network, 8)
    for _ in range(20):
        estimator.observe(daemon.reports())
    found = estimator.network()
    assert found is not None
    assert np.allclose(found.routing, network.routing, atol=0.02)
    assert np.allclose(found.commit, network.commit, atol=0.02)
    for got, true in zip(found.step_times, network.step_times, strict=True):
        for batch in (1, 4, 8, 16):
            assert got.of(batch) == pytest.approx(true.of(batch), rel=0.03)
    assert found.contention == (0.0, 0.0)


def test_the_time_of_a_hand_off_is_what_lies_between_both_sides() -> None:
    estimator, daemon = Estimator(group()), Daemon(paper_pair(), 8)
    for second in range(20):
        reports = daemon.reports()
        for name, waited in (("small", 0.5e-3), ("large", 1.1e-3)):
            times = {"waited": 10 * second, "waited_seconds": 10 * second * waited}
            times |= {"handed": 40 * second, "handed_seconds": 40 * second * 0.3e-3}
            reports[name] = msgspec.structs.replace(reports[name], **times)
        estimator.observe(reports)
        found = estimator.network()
        if second == 1:
            assert found is not None
            assert found.handoff == pytest.approx(0.5e-3, rel=0.01)
    assert found is not None
    # Counts of the entry, which takes more steps, are forgotten sooner.
    assert 0.5e-3 < found.handoff < 0.65e-3
    # What a sender does after the sending may take longer than the way.
    for learned in estimator.learned.values():
        learned.handed_seconds = learned.handed
    late = estimator.network()
    assert late is not None
    assert late.handoff == 0


def handing(**counts: float) -> float:
    """Seconds of a hand-off where the small model has counted this."""
    estimator, daemon = Estimator(group()), Daemon(paper_pair(), 8)
    for _ in range(5):
        estimator.observe(daemon.reports())
    for name, count in counts.items():
        setattr(estimator.learned["small"], name, count)
    network = estimator.network()
    assert network is not None
    return network.handoff


def test_senders_whose_steps_have_others_behind_them_send_after_the_end() -> None:
    known = {"waited": 100.0, "waited_seconds": 0.03, "handed": 100.0, "handed_seconds": -0.02}
    assert handing(**known) == pytest.approx(0.5e-3)
    few = {"handed": ENOUGH_HANDOFFS - 1.0, "handed_seconds": 0.0}
    assert handing(**(known | few)) == 0.0, "what a sender adds is not known"
    assert handing(**(known | {"handed": 0.0})) == 0.0


def test_contention_is_told_from_steps_that_ran_alone_and_together() -> None:
    network = Network.pair((StepTime.affine(2e-3), StepTime.affine(20e-3)), 0.35, contention=(1.0, 0.3))
    estimator, daemon = Estimator(group(shares=True)), Daemon(network, 8, overlap=True)
    for _ in range(20):
        estimator.observe(daemon.reports())
    found = estimator.network()
    assert found is not None
    assert found.contention == pytest.approx((1.0, 0.3), abs=0.15)
    assert found.step_times[0].of(4) == pytest.approx(2e-3, rel=0.1)
    assert found.step_times[1].of(4) == pytest.approx(20e-3, rel=0.1)


@pytest.mark.parametrize("factor", [0.0, 0.06, 1.0, 3.0])
def test_contention_is_told_from_steps_that_overlap_in_part(factor: float) -> None:
    """The small model runs for a while of each step of the large one, which lasts longer by what that takes from it."""
    dice = np.random.default_rng(1)
    estimator, now = Estimator(group(shares=True)), 0.0
    for part in range(11):
        small: list[Step] = []
        large: list[Step] = []
        for _ in range(40):
            # What else prolongs a step, such as its contexts, prolongs the overlap too.
            alone, share = 20e-3 * float(dice.uniform(0.9, 1.1)), float(dice.uniform(0, 1))
            seconds = alone / (1 - share * factor / (1 + factor))
            large.append(Step(now, seconds, 4))
            small += [Step(now, share * seconds, 2), Step(now + seconds, 2e-3, 2)]
            now += seconds + 2e-3
        estimator.observe(
            {
                "small": Report(now, 0.0, 8, 0, 0, 400 * part, {1: 200 * part}, {1: 200 * part}, small),
                "large": Report(now, 0.0, 8, 0, 0, 400 * part, {0: 400 * part}, {1: 400 * part}, large),
            }
        )
    found = estimator.network()
    assert found is not None
    assert found.contention[1] == pytest.approx(factor, rel=0.1, abs=0.05)
    assert found.step_times[1].of(4) == pytest.approx(20e-3, rel=0.05)


def test_too_little_is_known_at_first_and_after_a_restart_of_a_worker_counts_go_on() -> None:
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8, rate=50)
    run(controller, daemon, 5)
    assert not controller.lists
    assert "of" in controller.state
    assert str(ENOUGH) in controller.state
    daemon.rate = 1000
    run(controller, daemon, 30)
    known = controller.estimator.learned["large"].decisions
    assert controller.lists
    daemon.restart(1)
    controller.observe(daemon.reports())
    assert controller.estimator.learned["large"].decisions > known
    run(controller, daemon, 10)
    assert controller.lists


def test_a_worker_that_made_more_than_its_predecessor_is_another_one() -> None:
    """Its counts are all new, and what both made together is no throughput."""
    network = Network.pair((StepTime.affine(6e-3), StepTime.affine(28e-3)), 0.35, 0.8)
    controller, daemon = Controller(group()), Daemon(network, 8)
    run(controller, daemon, 2)
    daemon.restart(1)
    controller.observe(daemon.reports(6.0))
    own = controller.estimator.learned["large"]
    made = daemon.decisions[1]
    assert own.decisions == pytest.approx(made, rel=0.2)
    assert own.decisions > made
    assert own.moves["small"] == pytest.approx(0.8 * own.decisions, rel=0.05)
    assert controller.measured(daemon.now, 6.0) == Load()


def test_a_model_that_hardly_any_request_goes_to_keeps_nobody_waiting_for_it() -> None:
    names = (*NAMES, "third")
    controller, daemon = Controller(Group(names, (0, 1, 2), (False,) * 3, 256)), Daemon(paper_pair(), 8)
    third = Report(now=0, since=3.0, active=1, version=0, tokens=0, decisions=0, moves={}, runs={}, steps=[])

    def serve(seconds: int, steps: int) -> None:
        nonlocal third
        for _ in range(seconds):
            reports = daemon.reports()
            batches = [Step(daemon.now, 0.04, 1)] * steps
            changes = {"now": daemon.now, "decisions": third.decisions + steps, "tokens": third.tokens + steps}
            changes |= {"steps": batches, "moves": {0: (third.decisions + steps) // 4}}
            third = msgspec.structs.replace(third, **changes)
            moves = reports["small"].moves | {2: third.moves[0]}
            controller.observe(
                {**reports, "small": msgspec.structs.replace(reports["small"], moves=moves), "third": third}
            )
        controller.recompute(daemon.now)

    serve(2, 0)
    serve(1, 50)
    assert controller.state == f"learning: third has given 50 of {ENOUGH} tokens", "it might be a large part"
    serve(5, 0)
    assert controller.network is not None
    assert controller.network.names == NAMES
    assert controller.lists.keys() == set(NAMES)
    serve(2, 100)
    assert controller.network.names == names


def test_which_of_three_models_is_the_slowest_may_depend_on_the_requests() -> None:
    names = (*NAMES, "third")
    moves = ({"large": 1200.0, "third": 40.0}, {"small": 2000.0}, {"small": 2000.0})
    points = [(1.0, 0.001)], [(1.0, 0.0095), (2.0, 0.011)], [(1.0, 0.02)]
    facts = zip(names, moves, (760.0, 2000.0, 2000.0), points, strict=True)
    kept = Kept(
        {name: Learned(decisions=2000.0, tokens=made, moves=went, points=times) for name, went, made, times in facts}
    )
    controller = Controller(Group(names, (0, 1, 2), (False,) * 3, 256), kept)
    for now in (1.0, 2.0):
        report = Report(now=now, since=0.0, active=2, version=0, tokens=0, decisions=0, moves={}, runs={}, steps=[])
        controller.observe(dict.fromkeys(names, report))
    controller.recompute(2.0)
    assert controller.network is not None
    assert [controller.network.slowest(count) for count in (2, 16)] == [2, 1]
    assert controller.lists["large"][1] == 2, "the slowest one of many requests waits at two of them"
    lists = controller.lists
    controller.recompute(3.0)
    assert controller.lists == lists


def test_one_model_alone_is_no_network() -> None:
    controller = Controller(group())
    run(controller, Daemon(Network.pair((StepTime.affine(6e-3), StepTime.affine(28e-3)), 0.0), 8), 10)
    assert not controller.lists
    assert "handed over" in controller.state


@pytest.mark.usefixtures("soon")
def test_a_change_that_costs_throughput_is_taken_back_for_a_while() -> None:
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8, rate=1000)
    while not controller.lists:
        run(controller, daemon, 5)
    daemon.rate = 800  # whatever the model says, it has become slower
    run(controller, daemon, int(HOLD) + 5)
    assert not controller.lists
    assert controller.state.startswith("taken back")
    run(controller, daemon, int(FREEZE / 2))
    assert not controller.lists
    assert controller.trust < 0.8
    run(controller, daemon, int(FREEZE / 2) + 5)
    assert not controller.lists
    assert controller.state == "settled"
    daemon.rate = 1000
    assert waiting_seconds(controller, daemon, 200) > 0


# What the throughput model does not know


def waiting_seconds(controller: Controller, daemon: Daemon, seconds: int, truth: Truth | None = None) -> int:
    """Runs; for how many seconds the lists in force waited."""
    waited = 0
    for _ in range(0, seconds, 5):
        if truth is not None:
            daemon.rate = truth.rate(controller)
        controller.observe(daemon.reports(5.0))
        controller.recompute(daemon.now)
        waited += 5 * bool(controller.lists)
    return waited


class Truth:
    """A plant that the model is wrong about: throughput of the thresholds in force, by the simulator."""

    def __init__(self, network: Network, active: int) -> None:
        self._network, self._active = network, active
        self._rates: dict[tuple[int, ...], float] = {}

    def rate(self, controller: Controller) -> float:
        """Requests' steps a second."""
        lists = [controller.lists.get(name, [1]) for name in NAMES]
        return self.of(tuple(values[min(self._active, len(values)) - 1] for values in lists))

    def of(self, thresholds: tuple[int, ...]) -> float:
        """The same for given thresholds."""
        if thresholds not in self._rates:
            workload = MarkovWorkload(self._network.routing, self._active, 0)
            outcome = simulate(self._network, constant(thresholds), workload, 20_000)
            self._rates[thresholds] = outcome.steps_per_second
        return self._rates[thresholds]


@pytest.mark.usefixtures("soon")
def test_eager_launches_win_where_waiting_costs_what_the_model_leaves_out() -> None:
    network = paper_pair()
    truth = Truth(replace(network, handoff=6e-3), 8)
    controller, daemon = Controller(group()), Daemon(network, 8)
    assert waiting_seconds(controller, daemon, 60, truth) > 0
    assert not controller.lists
    assert controller.trust < 0.92
    assert truth.of((1, 1)) > 1.03 * truth.of(plan(network, 8).thresholds(8))
    # From then on it only tries, seldom and seldomer: after 100, 200 and 400 s.
    assert waiting_seconds(controller, daemon, 740, truth) in (30, 40)
    assert not controller.lists


@pytest.mark.usefixtures("soon")
def test_waiting_wins_where_it_gains_what_the_model_leaves_out() -> None:
    network = Network.pair((StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)), 0.25)
    truth = Truth(replace(network, contention=(1.0, 1.0)), 8)
    controller, daemon = Controller(group()), Daemon(network, 8)
    assert waiting_seconds(controller, daemon, 80, truth) == 0
    waiting_seconds(controller, daemon, 60, truth)
    assert controller.lists
    assert controller.trust > 1.1
    assert truth.of((1, 1)) < 0.9 * truth.rate(controller)
    # Eager launches are the other choice now.
    assert 150 <= waiting_seconds(controller, daemon, 200, truth) < 200
    assert controller.lists


@pytest.mark.usefixtures("soon")
def test_lists_that_workers_do_not_go_by_are_not_tried() -> None:
    truth = Truth(paper_pair(), 8)
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    for second in range(150):
        daemon.rate = truth.of((1, 1))
        controller.observe(daemon.reports())
        if second % 5 == 4:
            controller.recompute(daemon.now, obeyed=False)
            assert not controller.state.startswith("trying")
    assert controller.lists
    assert controller.trust == 1.0


def test_other_numbers_of_requests_are_not_compared() -> None:
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8, rate=1000)
    while not controller.lists:
        run(controller, daemon, 5)
    daemon.rate, daemon.active = 500, 4
    run(controller, daemon, int(LONGEST_WATCH))
    assert controller.lists
    assert controller.state == "settled"


# Prompts


BURST = (0.3, 0.8)
"""The shares of both models while 64 streams begin at once."""


def watched(prompts: tuple[float, float] = (0.0, 0.0)) -> tuple[Controller, Daemon]:
    """A plan has just been put into force, and keeps its promise from now on."""
    controller, daemon = Controller(group()), Daemon(paper_pair(), 64, prompts=prompts)
    while not controller.lists:
        run(controller, daemon, 5)
    assert controller.state == "watching the latest change"
    thresholds = [controller.lists[name][63] for name in NAMES]
    predictor = Predictor(paper_pair(), 64)
    daemon.rate *= predictor.steps_per_second(64, thresholds) / predictor.steps_per_second(64, (1, 1))
    return controller, daemon


def stays(controller: Controller, daemon: Daemon, seconds: int) -> None:
    """Runs; the lists in force are never taken back, and no more is learnt than that they keep their promise."""
    for _ in range(0, seconds, 5):
        run(controller, daemon, 5)
        assert controller.lists
        assert not controller.state.startswith("taken back")
    assert controller.state == "settled"
    assert controller.trust == pytest.approx(1.0, abs=0.03)


def test_the_share_of_prompts_is_that_of_the_model_with_the_most() -> None:
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    for daemon.prompts in ((0.0, 0.0), (0.5, 0.25), (0.25, 0.75), (0.0, 0.0)):
        controller.observe(daemon.reports())
    assert controller.measured(daemon.now).prompts == pytest.approx((0.5 + 0.75) / 3)
    daemon.restart(0)
    daemon.prompts = (1.0, 1.0)
    controller.observe(daemon.reports())
    assert controller.measured(daemon.now, 1.0) == Load()


def test_the_first_prompts_of_many_streams_speak_neither_for_the_plan_nor_against_it() -> None:
    """The small model reads its own first, the large one when it is first asked, which takes longer."""
    controller, daemon = watched((0.3, 0.0))
    daemon.prompts = BURST
    run(controller, daemon, int(HOLD))
    daemon.prompts = (0.0, 0.0)
    stays(controller, daemon, 30)


def test_a_plan_made_while_prompts_are_read_is_not_praised_for_their_end() -> None:
    controller, daemon = watched(BURST)
    daemon.prompts = (0.0, 0.0)
    run(controller, daemon, int(HOLD))
    # There is nothing to wait for: before it was a burst.
    assert controller.state == "settled"
    stays(controller, daemon, 30)
    assert controller.trust == 1.0


def test_a_burst_of_prompts_while_a_change_is_watched_does_not_take_it_back() -> None:
    controller, daemon = watched()
    daemon.prompts = BURST
    run(controller, daemon, 4)
    daemon.prompts = (0.0, 0.0)
    stays(controller, daemon, 30)


def test_a_change_is_watched_until_a_burst_matters_no_more() -> None:
    controller, daemon = watched()
    daemon.prompts = BURST
    run(controller, daemon, 4)
    daemon.prompts = (0.0, 0.0)
    daemon.rate *= 0.7
    run(controller, daemon, int(HOLD) - 4)
    assert controller.state == "watching the latest change"
    run(controller, daemon, int(HOLD))
    assert controller.state.startswith("taken back")
    assert not controller.lists


def test_a_loss_under_a_steady_share_of_prompts_is_taken_back() -> None:
    """Requests that end more slowly bring fewer prompts."""
    controller, daemon = watched((0.1, 0.4))
    daemon.rate *= 0.7
    daemon.prompts = (0.08, 0.32)
    run(controller, daemon, int(HOLD))
    assert not controller.lists
    assert controller.state.startswith("taken back")
    assert controller.trust < 0.8


@pytest.mark.usefixtures("soon")
def test_a_trial_among_prompts_goes_back_and_decides_nothing() -> None:
    truth = Truth(paper_pair(), 8)
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    while controller.state != "trying the other choice":
        waiting_seconds(controller, daemon, 5, truth)
    assert not controller.lists
    trust, daemon.prompts = controller.trust, BURST
    waiting_seconds(controller, daemon, int(HOLD), truth)
    assert controller.lists
    assert controller.state == "settled"
    assert controller.trust == trust
    # The next one comes as soon as if there had been none.
    daemon.prompts = (0.0, 0.0)
    assert waiting_seconds(controller, daemon, 90, truth) == 85


def test_runs_of_one_length_are_replayed() -> None:
    assert geometric({1: 100.0})
    assert geometric(dict(Counter(np.random.default_rng(0).geometric(0.1, 2000).tolist())))
    assert not geometric({10: 100.0})
    network = load("R2R 10%", "H")
    runs = [{9: 100.0}, {1: 100.0}]
    planned = plan(network, 4).thresholds(4)
    found = best(network, runs, 4, (1, 1), planned)
    assert feasible(found, 4)
    workload = RunWorkload(runs, network.routing, 4, 0)
    model, visits = 0, 0
    for _ in range(100):
        model = workload.move(0, model)
        visits += model
    assert visits in (9, 10, 11)


@pytest.mark.usefixtures("soon")
def test_replays_that_commit_nothing_promise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trouterd.batching.controller.geometric", lambda _: False)
    monkeypatch.setattr("trouterd.batching.controller.rates", lambda *_: [0.0, 0.0])
    monkeypatch.setattr("trouterd.batching.controller.best", lambda *_: (1, 3))
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    assert waiting_seconds(controller, daemon, 110) == 5
    assert controller.state == "trying the other choice"
    assert waiting_seconds(controller, daemon, 20) == 5
    assert controller.trust == 1.0


def test_runs_without_a_step_and_models_that_nobody_leaves_can_be_replayed() -> None:
    network = load("R2R 10%", "H")
    assert best(network, [{0: 1.0, 9: 100.0}, {0: 1.0}], 4, (1, 1), (1, 3))
    stays = Network.pair(network.step_times, 0.1, back=0.0)
    workload = RunWorkload([{0: 1.0, 9: 100.0}, {1: 1.0}], stays.routing, 2, 0)
    model = 0
    for _ in range(50):
        model = workload.move(0, model)
    assert model == 1


# What is kept


def config(**changes: object) -> Config:
    models = {"small": Model(path="s"), "large": Model(path="l"), "other": Model(path="o")}
    routes = {"demo": Route(models=["small", "large"]), "single": Route(models=["other"])}
    return Config(models=models, routes=routes | changes)  # type: ignore[arg-type]


def test_groups_are_what_routes_connect() -> None:
    assert [found.models for found in groups_of(config())] == [("small", "large")]
    joined = config(more=Route(models=["large", "other"]))
    assert [found.models for found in groups_of(joined)] == [("small", "large", "other")]


def test_how_models_share_a_gpu_is_part_of_what_was_learned() -> None:
    def on_gpus(first: Model, second: Model, mps: Literal["auto", "off"] = "auto") -> str:
        routes = {"demo": Route(models=["small", "large"])}
        return fingerprint(Config(gpu=Gpu(mps=mps), models={"small": first, "large": second}, routes=routes))

    small, large = Model(path="s", device="cuda:0"), Model(path="l", device="cuda:0")
    apart = msgspec.structs.replace(large, device="cuda:1")
    changes = [{"megakernel_percent": 50}, {"sm_percent": 50}, {"megakernel": "off"}, {"depth": 1}]
    others = [on_gpus(msgspec.structs.replace(small, **change), large) for change in changes]
    others += [on_gpus(small, large, "off"), on_gpus(small, apart)]
    assert len({on_gpus(small, large), *others}) == 1 + len(others)
    assert on_gpus(small, apart, "off") == on_gpus(small, apart), "there is nothing to share"


def test_learned_values_survive_a_restart(tmp_path: Path) -> None:
    path, print_ = tmp_path / "batching.json", fingerprint(config())
    controller = Controller(group())
    run(controller, Daemon(paper_pair(), 8), 30)
    controller.estimator.learned["small"].handed_seconds = -0.5
    state.save(path, print_, {"small": controller.keep(130.0)})
    kept = state.load(path, print_)
    again = Controller(group(), kept["small"])
    assert again.lists == controller.lists
    assert again.estimator.lacks() == ""
    assert again.estimator.learned["small"].handed_seconds == -0.5
    again.recompute(1000.0)
    assert again.lists == controller.lists
    assert [entry.name for entry in tmp_path.iterdir()] == ["batching.json"]


def trying() -> tuple[Controller, Daemon]:
    """The plan's lists are in force, but for eager launches that are being tried."""
    truth = Truth(paper_pair(), 8)
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    while controller.state != "trying the other choice":
        waiting_seconds(controller, daemon, 5, truth)
    assert not controller.lists
    return controller, daemon


def once_more(controller: Controller, now: float) -> Controller:
    """As after a restart: made from what a file kept of it."""
    kept = msgspec.json.decode(msgspec.json.encode(controller.keep(now)), type=Kept)
    return Controller(group(), kept, now)


@pytest.mark.usefixtures("soon")
def test_nothing_is_kept_of_a_trial() -> None:
    controller, daemon = trying()
    kept = controller.keep(daemon.now).lists
    assert max(kept["large"]) > 1
    run(controller, daemon, int(HOLD))
    assert controller.state == "settled"
    assert controller.lists == kept
    assert controller.keep(daemon.now).lists == kept


@pytest.mark.usefixtures("soon")
def test_what_is_being_watched_is_kept_unless_it_is_a_trial() -> None:
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8)
    while controller.state != "watching the latest change":
        run(controller, daemon, 5)
    assert controller.lists
    assert controller.keep(daemon.now).lists == controller.lists


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("turns", [False, True])
def test_a_trial_that_is_not_judged_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, turns: bool) -> None:
    controller, daemon = trying()
    kept = controller.keep(daemon.now).lists
    # What the throughput model says of it is another matter.
    monkeypatch.setattr(controller, "_improve", lambda *_, **__: None)
    controller.turns = turns
    assert controller.recompute(daemon.now, obeyed=turns), "workers have to be told"
    assert controller.lists == controller.keep(daemon.now).lists == kept


def test_a_freeze_outlives_a_restart() -> None:
    controller, daemon = watched()
    daemon.rate *= 0.7
    run(controller, daemon, int(HOLD))
    assert controller.state.startswith("taken back")
    run(controller, daemon, 20)
    # Whatever the clock says there.
    later = replace(daemon, now=daemon.now + 1e5)
    again = Controller(group(), controller.keep(daemon.now), later.now)
    run(again, later, int(FREEZE) - 25)
    assert again.state.startswith("taken back")
    assert not again.lists
    run(again, later, 10)
    assert not again.state.startswith("taken back")
    # The next one lasts twice as long.
    assert once_more(again, later.now).keep(later.now).freeze == 2 * FREEZE


def test_a_freeze_of_models_that_took_turns_says_nothing_of_models_side_by_side() -> None:
    controller, daemon = watched()
    daemon.rate *= 0.7
    run(controller, daemon, int(HOLD))
    again = once_more(controller, daemon.now)
    again.turns = False
    assert again.keep(daemon.now).frozen == FREEZE
    again.turns = True
    assert again.keep(daemon.now).frozen == 0
    assert once_more(again, daemon.now).turns


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "fingerprint": 3}', "\xff"])
def test_a_broken_file_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batching.json"
    path.write_bytes(text.encode("latin-1"))
    assert state.load(path, "x") == {}
    assert state.load(tmp_path / "none", "x") == {}
    assert state.load(tmp_path, "x") == {}


@pytest.mark.parametrize(
    "facts",
    [
        {"points": [[1, 1e-9]]},
        {"points": [[1, 1e12]]},
        {"points": [[1e9, 1.0]]},
        {"points": [[size + 1, 1.0] for size in range(2001)]},
        {"runs": {str(10**30): 1.0}},
        {"runs": {str(length): 1.0 for length in range(5000)}},
        {"waited": 1e12, "waited_seconds": 1e12, "handed": 30, "handed_seconds": -1e12},
        {"waited": 1, "waited_seconds": 1001.0},
    ],
)
def test_a_file_that_no_machine_can_have_written_is_ignored(tmp_path: Path, facts: dict[str, Any]) -> None:
    path = tmp_path / "batching.json"
    sound = {"points": [[1, 1e-6], [2000, 1e3]], "runs": {"100000": 1.0}, "waited": 2, "waited_seconds": 2000}
    for learned, used in ((sound, True), (sound | facts, False)):
        file = {"version": 1, "fingerprint": "x", "groups": {"small": {"learned": {"small": learned}}}}
        path.write_text(json.dumps(file))
        assert bool(state.load(path, "x")) == used


def test_a_file_of_other_models_or_versions_is_ignored(tmp_path: Path) -> None:
    path, print_ = tmp_path / "batching.json", fingerprint(config())
    state.save(path, print_, {"small": Kept()})
    assert state.load(path, print_) == {"small": Kept()}
    assert state.load(path, fingerprint(config(more=Route(models=["large", "other"])))) == {}
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"version": 99}))
    assert state.load(path, print_) == {}


def test_lists_of_a_file_are_cut_to_what_can_work() -> None:
    few = Group(NAMES, (0, 1), (False, False), 3)
    kept = Kept(lists={"small": [1, 2, 9], "large": [5, 2, 2, 4], "other": [2]}, trust=99.0)
    controller = Controller(few, kept)
    assert controller.lists == {"small": [1, 1, 2, 2], "large": [1, 2, 2, 3]}
    assert controller.trust == 1.5
    for n in range(1, 5):
        assert feasible([values[n - 1] for values in controller.lists.values()], n)
    fine: dict[str, list[int]] = {"large": [1, 2, 2, 3]}
    assert Controller(few, Kept(lists=fine)).lists == fine
    assert Controller(few, Kept(lists={"large": []})).lists == {}
    assert len(Controller(few, Kept(lists={"large": [1] * 10_000})).lists["large"]) == MOST


@pytest.mark.parametrize(
    ("group", "field"),
    [
        ({"lists": {"large": [1, 0]}}, "lists"),
        ({"learned": {"large": {"decisions": -1}}}, "decisions"),
        ({"learned": {"large": {"runs": {"4": 0.0}}}}, "runs"),
        ({"learned": {"large": {"points": [[1, 0.0]]}}}, "points"),
        ({"learned": {"large": {"points": [[1, 1e300]]}}}, "points"),
        ({"learned": {"large": {"moves": {"small": 1e300}}}}, "moves"),
        ({"learned": {"large": {"contention": -0.5}}}, "contention"),
        ({"learned": {"large": {"contention": 1e9}}}, "contention"),
        ({"frozen": -1.0}, "frozen"),
        ({"freeze": -1.0}, "freeze"),
    ],
)
def test_a_file_with_values_that_cannot_be_is_ignored(
    group: dict[str, object], field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "batching.json"
    path.write_text(json.dumps({"version": state.VERSION, "fingerprint": "x", "groups": {"small": group}}))
    assert state.load(path, "x") == {}
    assert field in caplog.text


def test_a_folder_that_is_not_there_costs_the_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state.save(tmp_path / "none" / "batching.json", "x", {})
    assert "cannot be written" in caplog.text


def test_where_the_file_is() -> None:
    given = Config(server=Server(control="/run/t/t.ctl"))
    assert state.path_of(given, {}) == Path("/run/t/t.batching.json")
    assert state.path_of(Config(), {}) is None
    assert state.path_of(Config(batching=Batching(state="/a/b")), {}) == Path("/a/b")
    assert state.path_of(given, {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a/batching.json")
