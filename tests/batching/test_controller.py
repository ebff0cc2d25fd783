"""The controller on simulated daemons whose true parameters are known: it finds their plan, and behaves when it cannot."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.batching.loads import load, paper_pair
from trouterd.batching import controller as controller_module
from trouterd.batching import state
from trouterd.batching.controller import FREEZE, GAIN, HOLD, WAITING, Controller, Kept
from trouterd.batching.estimate import ENOUGH, Estimator
from trouterd.batching.groups import Group, fingerprint, groups_of
from trouterd.batching.launch import feasible
from trouterd.batching.network import Network, StepTime
from trouterd.batching.plan import plan
from trouterd.batching.predictor import Predictor
from trouterd.batching.replay import RunWorkload, best, geometric
from trouterd.batching.report import Report, Step
from trouterd.config import Batching, Config, Model, Route, Server

NAMES = ("small", "large")


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated daemons keep what the throughput model promises: small gains of waiting are real here."""
    monkeypatch.setattr(controller_module, "WAITING", GAIN)


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

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)

    def reports(self, seconds: float = 1.0) -> dict[str, Report]:
        """One second later."""
        self.now += seconds
        found = {}
        for model, name in enumerate(NAMES):
            count = int(self.rate * seconds * self.network.shares[model])
            leaving = self.dice.binomial(count, self.network.routing[model][1 - model])
            self.decisions[model] += count
            self.moves[model][1 - model] += int(leaving)
            kept = self.network.commit[model][1 - model]
            self.tokens[model] += count - leaving + int(kept * leaving)
            share = max(leaving / max(count, 1), 1e-9)
            self.runs[model].update(self.dice.geometric(share, leaving).tolist())
            found[name] = Report(
                now=self.now,
                active=self.active,
                version=self.version,
                tokens=self.tokens[model],
                decisions=self.decisions[model],
                moves=dict(self.moves[model]),
                runs=dict(self.runs[model]),
                steps=self._steps(model),
            )
        return found

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
    assert controller.lingers["large"] == pytest.approx(2 * 27.9e-3, rel=0.1)


def test_promises_of_waiting_are_not_taken_at_their_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "WAITING", WAITING)
    waits = {}
    for share in (0.35, 0.54):
        network = Network.pair((StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)), share)
        predictor, planned = Predictor(network, 8), plan(network, 8).thresholds(8)
        promise = predictor.steps_per_second(8, planned) / predictor.steps_per_second(8, (1, 1)) - 1
        assert promise > 3 * GAIN
        controller = Controller(group())
        run(controller, Daemon(network, 8), 30)
        waits[promise > WAITING] = any(max(values) > 1 for values in controller.lists.values())
    assert waits == {True: True, False: False}


def test_eager_stays_where_waiting_gains_nothing() -> None:
    controller = Controller(group())
    network = Network.pair((StepTime.affine(1e-3, 1e-5), StepTime.affine(8e-3, 5e-5)), 1 / 19)
    run(controller, Daemon(network, 8, rate=3000), 30)
    assert not controller.lists
    assert controller.state == "settled"


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
    daemon.decisions[1], daemon.tokens[1] = 0, 0
    daemon.moves[1].clear()
    daemon.runs[1].clear()
    controller.observe(daemon.reports())
    assert controller.estimator.learned["large"].decisions == known
    run(controller, daemon, 10)
    assert controller.lists


def test_one_model_alone_is_no_network() -> None:
    controller = Controller(group())
    run(controller, Daemon(Network.pair((StepTime.affine(6e-3), StepTime.affine(28e-3)), 0.0), 8), 10)
    assert not controller.lists
    assert "handed over" in controller.state


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
    run(controller, daemon, int(FREEZE / 2) + 5)
    assert controller.lists


def test_other_numbers_of_requests_are_not_compared() -> None:
    controller, daemon = Controller(group()), Daemon(paper_pair(), 8, rate=1000)
    while not controller.lists:
        run(controller, daemon, 5)
    daemon.rate, daemon.active = 500, 4
    run(controller, daemon, int(HOLD) + 5)
    assert controller.lists


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


def test_learned_values_survive_a_restart(tmp_path: Path) -> None:
    path, print_ = tmp_path / "batching.json", fingerprint(config())
    controller = Controller(group())
    run(controller, Daemon(paper_pair(), 8), 30)
    state.save(path, print_, {"small": controller.keep()})
    kept = state.load(path, print_)
    again = Controller(group(), kept["small"])
    assert again.lists == controller.lists
    assert again.estimator.lacks() == ""
    again.recompute(1000.0)
    assert again.lists == controller.lists
    assert [entry.name for entry in tmp_path.iterdir()] == ["batching.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "fingerprint": 3}', "\xff"])
def test_a_broken_file_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batching.json"
    path.write_bytes(text.encode("latin-1"))
    assert state.load(path, "x") == {}
    assert state.load(tmp_path / "none", "x") == {}
    assert state.load(tmp_path, "x") == {}


def test_a_file_of_other_models_or_versions_is_ignored(tmp_path: Path) -> None:
    path, print_ = tmp_path / "batching.json", fingerprint(config())
    state.save(path, print_, {"small": Kept()})
    assert state.load(path, print_) == {"small": Kept()}
    assert state.load(path, fingerprint(config(more=Route(models=["large", "other"])))) == {}
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"version": 99}))
    assert state.load(path, print_) == {}


def test_a_folder_that_is_not_there_costs_the_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state.save(tmp_path / "none" / "batching.json", "x", {})
    assert "cannot be written" in caplog.text


def test_where_the_file_is() -> None:
    given = Config(server=Server(control="/run/t/t.ctl"))
    assert state.path_of(given, {}) == Path("/run/t/t.batching.json")
    assert state.path_of(Config(), {}) is None
    assert state.path_of(Config(batching=Batching(state="/a/b")), {}) == Path("/a/b")
    assert state.path_of(given, {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a/batching.json")
