"""The controller where the throughput model or the load is not what it takes it for: measured throughput has the last word."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.batching.daemon import NAMES, Daemon, group, run
from tests.batching.loads import paper_pair
from tests.batching.plant import simulated
from trouterd.batching import trials as trials_module
from trouterd.batching.controller import Controller, Kept
from trouterd.batching.network import Network, StepTime
from trouterd.batching.plan import plan
from trouterd.batching.predictor import Predictor
from trouterd.batching.trials import FREEZE, HOLD, LONGEST_WATCH, TRY, Load


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other choice is tried every 100 s, so that no test has to go through hours."""
    assert HOLD <= 0.02 * TRY
    monkeypatch.setattr(trials_module, "TRY", 100.0)
    monkeypatch.setattr(trials_module, "LONGEST", 400.0)


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
            self._rates[thresholds] = simulated(self._network, self._active, thresholds)
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
