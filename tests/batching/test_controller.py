"""The controller on simulated daemons whose true parameters are known: it finds their plan, and behaves when it cannot."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from tests.batching.daemon import NAMES, Daemon, group, run
from tests.batching.loads import load, paper_pair
from trouterd.batching import controller as controller_module
from trouterd.batching import state
from trouterd.batching.controller import MOST, WAITING, Controller, Kept
from trouterd.batching.groups import Group, fingerprint, groups_of
from trouterd.batching.launch import feasible
from trouterd.batching.network import Network, StepTime
from trouterd.batching.plan import BatchingPlan, plan
from trouterd.batching.predictor import Predictor
from trouterd.batching.replay import RunWorkload, best, geometric
from trouterd.batching.trials import Load
from trouterd.config import Batching, Config, Gpu, Model, Route, Server


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
