"""What is learned from the counts of simulated daemons whose true parameters are known."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.batching.daemon import NAMES, Daemon, group, run
from tests.batching.loads import paper_pair
from trouterd.batching.controller import Controller, Kept
from trouterd.batching.estimate import ENOUGH, ENOUGH_HANDOFFS, Estimator, Learned
from trouterd.batching.groups import Group
from trouterd.batching.network import Network, StepTime
from trouterd.batching.report import Report, Step
from trouterd.batching.trials import Load


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
