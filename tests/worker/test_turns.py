"""Workers that take turns: which steps a turn has, when it ends, what comes with it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import pytest

from ipc.messages import Message, PeerReq
from models.resident import StepRecord
from models.script import ScriptRunner
from tests.harness import Answer, Cluster
from tests.worker.resident import FakeResident
from tests.worker.test_pipeline import Held
from trouterd.config import Route
from trouterd.worker.turn import TurnError

AnyTurn = TypeVar("AnyTurn")


def made_of(monkeypatch: pytest.MonkeyPatch, kind: Callable[[int, Callable[[], None]], AnyTurn]) -> list[AnyTurn]:
    """The turns of a kind that workers make from now on."""
    made: list[AnyTurn] = []

    def make(file: int, granted: Callable[[], None]) -> AnyTurn:
        made.append(kind(file, granted))
        return made[-1]

    monkeypatch.setattr("trouterd.worker.turn.Turn", make)
    return made


class SharedTurn:
    """A turn that somebody else has whenever it is asked for first, and that comes at once then."""

    def __init__(self, file: int, granted: Callable[[], None]) -> None:
        del file
        self.granted = granted
        self.held = self.used = False
        self.others = True
        """Somebody waits, whoever asks."""
        self.taken = 0

    def wanted(self) -> bool:
        return self.others

    def take(self, *, look: bool = False) -> bool:
        assert not look, "these workers sleep"
        if not self.held:
            asyncio.get_running_loop().call_soon(self.grant)
        self.used = self.held
        return self.held

    def grant(self) -> None:
        self.held = True
        self.taken += 1
        self.granted()

    def leave(self) -> None:
        """Nobody looks."""

    def give_back(self) -> None:
        self.held = self.used = False


class SlowTurn(SharedTurn):
    """A turn that comes when it is asked for, but not before some time has gone by: the one before ends meanwhile."""

    def __init__(self, file: int, granted: Callable[[], None]) -> None:
        super().__init__(file, granted)
        self.begun: list[float] = []

    def take(self, *, look: bool = False) -> bool:
        del look
        if not self.held:
            time.sleep(0.002)
            self.held = self.used = True
            self.begun.append(time.monotonic())
        return True


async def test_no_step_begins_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would seem to have run beside the one that ended then."""
    made = made_of(monkeypatch, SlowTurn)
    cluster = Cluster({"m": ScriptRunner([1], vocab_size=4, cycle=True)}, {"demo": Route(models=["m"])})
    worker = cluster.workers["m"]
    worker.turns.configure(0)
    async with cluster.running(), asyncio.timeout(30):
        await cluster.generate("demo", [1], max_tokens=9)
        await cluster.settled()
    steps = worker.observer.since(0.0)
    assert len(steps) == 9
    assert all(step.begin >= begun for step, begun in zip(steps, made[0].begun, strict=True))


class Beginning(Protocol):
    """A turn that says when it begins."""

    on_begin: Callable[[], object]


async def rows_of_a_first_step(made: Sequence[Beginning], *, watches: bool) -> int:
    """Of a turn that one request waits for, and with which another one arrives."""
    device = FakeResident(ScriptRunner([1], vocab_size=4, cycle=True))
    cluster = Cluster({"m": device}, {"demo": Route(models=["m"])}, watches=watches)
    cluster.workers["m"].turns.configure(0)
    made[0].on_begin = lambda: asyncio.get_running_loop().call_soon(cluster.submit, "demo", [1])
    cluster.submit("demo", [1])
    async with cluster.running(), asyncio.timeout(30):
        while not device.launched:
            await asyncio.sleep(0)
        made[0].on_begin = lambda: None
        await cluster.settled()
    return len(device.launched[0])


async def test_what_was_sent_in_the_turn_before_is_in_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nobody has read it from the ring when that turn ends."""
    made = made_of(monkeypatch, LoggedTurn)
    assert await rows_of_a_first_step(made, watches=False) == 2


async def test_what_comes_with_the_turn_is_asked_about_before_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose tokens the host decides waits for what is in flight: here a step that the device skips."""
    made = made_of(monkeypatch, LoggedTurn)
    refused = itertools.cycle((False, True))
    small = Held(ScriptRunner([1], vocab_size=4, cycle=True), refuse=lambda _: next(refused))
    small.skipped = 1
    large = ScriptRunner([2], vocab_size=4, cycle=True)
    route = Route(models=["small", "large"], algorithm="every_n", params={"shape": "visit", "n": 2})
    cluster = Cluster({"small": small, "large": large}, {"demo": route, "host": route})
    worker = cluster.workers["small"]
    worker.turns.configure(0)
    hosted: list[Answer] = []

    def arrive() -> None:
        hosted.append(cluster.submit("host", [1, 2], max_tokens=6)[1])

    def begin() -> None:
        if worker.stepper.in_flight and not hosted:
            asyncio.get_running_loop().call_soon(arrive)

    made[0].on_begin = begin
    async with cluster.running(), asyncio.timeout(30):
        _, answer = cluster.submit("demo", [1], max_tokens=8)
        small.allowed = 1
        while len(small.launched) < 3:
            await asyncio.sleep(0)
        small.allowed = 1
        while not hosted:
            await asyncio.sleep(0)
        small.allowed = 10**6
        await answer.done.wait()
        await hosted[0].done.wait()
        await cluster.settled()
    assert answer.writers == [0, 1] * 4
    assert hosted[0].writers == [0, 1] * 3


@pytest.mark.parametrize("aborted", [False, True])
async def test_a_stop_that_comes_with_the_turn(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """Also where nothing is left to be launched."""
    made = made_of(monkeypatch, LoggedTurn)
    cluster = Cluster({"m": ScriptRunner([1], vocab_size=4, cycle=True)}, {"demo": Route(models=["m"])})
    worker = cluster.workers["m"]
    worker.turns.configure(0)
    rid, _ = cluster.submit("demo", [1])

    def end() -> None:
        if aborted:
            cluster.abort(rid, "demo")
        worker.stop()

    made[0].on_begin = lambda: asyncio.get_running_loop().call_soon(end)
    async with asyncio.timeout(30):
        await worker.run()
    assert worker.stepper.steps == (not aborted)


async def test_waiting_for_the_turn_costs_nobody_his_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes one row of two requests: they write in turns, although every step waits for its turn first."""
    monkeypatch.setattr("trouterd.worker.turn.Turn", SharedTurn)
    script = ScriptRunner([1], vocab_size=4, cycle=True)
    cluster = Cluster({"m": script}, {"demo": Route(models=["m"])}, max_batch_tokens=2)
    cluster.workers["m"].turns.configure(0)
    first, second = (cluster.submit("demo", [1], max_tokens=20)[1] for _ in range(2))
    async with cluster.running(), asyncio.timeout(30):
        await second.until(1)
        cluster.workers["m"].scheduler.max_batch_tokens = 1
        await asyncio.wait(
            [asyncio.create_task(answer.until(10)) for answer in (first, second)], return_when="FIRST_COMPLETED"
        )
        assert abs(len(first.tokens) - len(second.tokens)) <= 1
        await cluster.settled()


async def test_no_turn_is_taken_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_of(monkeypatch, SharedTurn)
    script = ScriptRunner([1], vocab_size=4, cycle=True)
    cluster = Cluster({"m": script}, {"demo": Route(models=["m"])})
    cluster.workers["m"].turns.configure(0)
    async with cluster.running(), asyncio.timeout(30):
        await cluster.generate("demo", [1], max_tokens=3)
        await cluster.settled()
    assert made[0].taken == cluster.workers["m"].stepper.steps
    assert not made[0].held


@pytest.mark.parametrize(("others", "most"), [(False, 2), (True, 1)])
async def test_steps_are_queued_in_a_turn_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch, others: bool, most: int
) -> None:
    made = made_of(monkeypatch, SharedTurn)
    device = FakeResident(ScriptRunner([1], vocab_size=4, cycle=True), patience=3)
    cluster = Cluster({"m": device}, {"demo": Route(models=["m"])})
    cluster.workers["m"].turns.configure(0)
    made[0].others = others
    async with cluster.running(), asyncio.timeout(30):
        await cluster.generate("demo", [1], max_tokens=9)
        await cluster.settled()
    assert device.most_in_flight == most
    assert (made[0].taken == len(device.launched)) == others
    assert not made[0].held


class LoggedTurn(SharedTurn):
    """A turn that comes at once and says when it ends."""

    def __init__(self, file: int, granted: Callable[[], None]) -> None:
        super().__init__(file, granted)
        self.others = False
        self.on_begin: Callable[[], object] = lambda: None
        self.on_end: Callable[[], None] = lambda: None

    def take(self, *, look: bool = False) -> bool:
        del look
        if not self.held:
            self.on_begin()
        self.held = self.used = True
        return True

    def give_back(self) -> None:
        super().give_back()
        self.on_end()


class Late(FakeResident):
    """Gives one record at a time, and that when it is asked for the third time."""

    asked = 0

    def poll(self) -> StepRecord | None:
        self.asked += 1
        return None if self.asked % 3 else super().poll()


@pytest.mark.parametrize("queued", [0, 1])
async def test_a_turn_ends_with_the_step_that_hands_its_requests_on(
    monkeypatch: pytest.MonkeyPatch, queued: int
) -> None:
    """Before anything else runs, and whether or not a step that the device is about to skip is queued behind that one: whoever
    gets the request asks for its turn at once."""
    made = made_of(monkeypatch, LoggedTurn)
    small, large = (Late(ScriptRunner([n], vocab_size=4, cycle=True), 1 + queued) for n in (1, 2))
    small.skipped = 1
    route = Route(models=["small", "large"], algorithm="every_n", params={"shape": "visit", "n": 2})
    cluster = Cluster({"small": small, "large": large}, {"demo": route})
    events: list[str] = []

    def see(source: int, target: int, message: Message) -> bool:
        if source == 0 and isinstance(message, PeerReq):
            events.append("handed on")
            asyncio.get_running_loop().call_soon(events.append, "later")
        return True

    cluster.accept = see
    cluster.workers["small"].turns.configure(0)
    made[0].on_end = lambda: events.append(f"over, {small.in_flight} queued")
    async with cluster.running(), asyncio.timeout(30):
        answer = await cluster.generate("demo", [1], max_tokens=9)
        await cluster.settled()
    assert answer.writers == [0, 1] * 4 + [0]
    after = [events[n + 1 : n + 3] for n, event in enumerate(events) if event == "handed on"]
    assert after == [[f"over, {queued} queued", "later"]] * 4


async def test_no_step_ends_behind_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would seem to have run beside the one that begins then."""
    made = made_of(monkeypatch, LoggedTurn)
    cluster = Cluster({"m": ScriptRunner([1], vocab_size=4, cycle=True)}, {"demo": Route(models=["m"])})
    worker = cluster.workers["m"]
    worker.turns.configure(0)
    ended: list[float] = []
    made[0].on_end = lambda: ended.append(time.monotonic())
    async with cluster.running(), asyncio.timeout(30):
        await cluster.generate("demo", [1], max_tokens=9)
        await cluster.settled()
    steps = worker.observer.since(0.0)
    assert len(steps) == len(ended) == 9
    assert all(step.begin + step.seconds <= end for step, end in zip(steps, ended, strict=True))


async def test_a_step_behind_one_that_is_skipped_has_a_turn_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn in which that one was queued is over."""
    made = made_of(monkeypatch, LoggedTurn)
    small = Held(ScriptRunner([1], vocab_size=4, cycle=True))
    small.skipped = 1
    large = ScriptRunner([2], vocab_size=4, cycle=True)
    route = Route(models=["small", "large"], algorithm="every_n", params={"shape": "visit", "n": 2})
    cluster = Cluster({"small": small, "large": large}, {"demo": route})
    cluster.workers["small"].turns.configure(0)
    async with cluster.running(), asyncio.timeout(30):
        _, answer = cluster.submit("demo", [1], max_tokens=4)
        small.allowed = 2
        while not (len(small.launched) == 4 and made[0].held):
            await asyncio.sleep(0)
        assert small.in_flight == 2, "the skipped one, and that of the request that has come back"
        small.allowed = 10**6
        await answer.done.wait()
        await cluster.settled()
    assert not made[0].held


async def test_a_worker_whose_turn_cannot_come_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never launch again otherwise, and nobody would know why."""

    def lockf(file: int, operation: int, length: int, start: int) -> None:
        del file, length, start
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    cluster = Cluster({"m": ScriptRunner([1], vocab_size=4, cycle=True)}, {"demo": Route(models=["m"])})
    worker = cluster.workers["m"]
    worker.turns.configure(0)
    cluster.submit("demo", [1, 2], max_tokens=3)
    async with asyncio.timeout(30):
        with pytest.raises(
            TurnError, match=r"batching\.overlap: the file of turns cannot be locked: No locks available"
        ):
            await worker.run()


async def test_a_turn_ends_where_models_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although steps are queued behind each other without end, so that some are always in flight."""
    made = made_of(monkeypatch, SharedTurn)
    device = FakeResident(ScriptRunner([1], vocab_size=4, cycle=True), patience=3)
    cluster = Cluster({"m": device}, {"demo": Route(models=["m"])})
    turns = cluster.workers["m"].turns
    turns.configure(0)
    made[0].others = False
    async with cluster.running(), asyncio.timeout(30):
        _, answer = cluster.submit("demo", [1], max_tokens=100)
        await answer.until(10)
        while not made[0].held:  # both steps in flight have just ended
            await asyncio.sleep(0)
        turns.configure(None)
        await answer.until(20)
        assert not made[0].held
        assert not answer.finish
        made[0].grant()
        await answer.until(30)
        assert not made[0].held, "one that comes late"
        await cluster.settled()
