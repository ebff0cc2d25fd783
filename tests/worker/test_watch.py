"""Workers that stay awake while they wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import pytest

from ipc.messages import PeerReq
from models.script import ScriptRunner
from tests.harness import Cluster
from tests.worker.test_turns import made_of, rows_of_a_first_step
from trouterd.config import Config, Model, Rings, Route
from trouterd.worker import main, worker
from trouterd.worker.inbox import Inbox

ROUTE = Route(models=["small", "large"], algorithm="every_n", params={"shape": "visit", "n": 2})


def pair() -> Cluster:
    """Two models that write in turns, and watch."""
    runners = {name: ScriptRunner([n], vocab_size=4, cycle=True) for n, name in ((1, "small"), (2, "large"))}
    return Cluster(runners, {"demo": ROUTE}, watches=True)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Event]:
    """Set, in turn, whenever some worker goes to sleep; the test appends what it waits for."""
    waiting: list[asyncio.Event] = []
    wait = Inbox.wait

    async def seen(self: Inbox, until: float) -> None:
        for event in waiting:
            event.set()
        await wait(self, until)

    monkeypatch.setattr(Inbox, "wait", seen)
    return waiting


async def test_who_watches_writes_the_same() -> None:
    cluster = pair()
    async with cluster.running(), asyncio.timeout(30):
        answers = await asyncio.gather(*(cluster.generate("demo", [1, n], max_tokens=12) for n in range(5)))
        await cluster.settled()
    assert all(answer.writers == [0, 1] * 6 for answer in answers)
    assert all(answer.tokens == [1, 2] * 6 for answer in answers)


async def test_nobody_sleeps_while_a_request_is_away(
    sleeps: list[asyncio.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the time for that is up, from which on it is woken as ever."""
    monkeypatch.setattr(worker, "WATCH", 10.0)
    cluster = pair()
    cluster.hold = lambda source, target, message: isinstance(message, PeerReq) and source == 1
    async with cluster.running(), asyncio.timeout(30):
        slept = asyncio.Event()
        _, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await answer.until(1)
        sleeps.append(slept)
        while not cluster.held:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not slept.is_set()
        monkeypatch.setattr(worker, "WATCH", 0.01)
        for each in cluster.workers.values():
            each._awake_until = 0.0
            each._inbox.wake()
        await slept.wait()
        cluster.hold = lambda *_: False
        for _, target, message in cluster.held:
            cluster.deliver(target, message)
        await answer.done.wait()
        await cluster.settled()
    assert answer.writers == [0, 1] * 4


async def test_who_has_no_request_sleeps(sleeps: list[asyncio.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "WATCH", 100.0)
    cluster = pair()
    async with cluster.running(), asyncio.timeout(30):
        await cluster.generate("demo", [1], max_tokens=4)
        await cluster.settled()
        sleeps.append(asyncio.Event())
        for each in cluster.workers.values():
            each._inbox.wake()
        await sleeps[0].wait()


class Looked:
    """A turn that comes when it has been looked for so often."""

    def __init__(self, file: int, granted: Callable[[], None]) -> None:
        del file
        self.held = self.used = False
        self.granted = granted
        self.needed = 5
        self.looks = 0
        """All in all."""
        self.looking = 0
        self.rests = 0
        self.on_begin: Callable[[], object] = lambda: None

    def wanted(self) -> bool:
        return False

    def take(self, *, look: bool) -> bool:
        assert look
        self.looking = 0 if self.held else self.looking or 1
        self.used = self.held
        return self.held

    def come(self) -> bool:
        if not self.looking:
            return False
        self.looks += 1
        self.looking += 1
        if self.looking > self.needed:
            self.on_begin()
            self.held, self.looking = True, 0
        return self.held

    def rest(self) -> None:
        if self.looking:
            self.rests += 1
            self.looking = 0
            asyncio.get_running_loop().call_soon(self.grant)

    def grant(self) -> None:
        self.held = True
        self.granted()

    def leave(self) -> None:
        self.looking = 0

    def give_back(self) -> None:
        self.held = self.used = False


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Looked]:
    """Those that are made."""
    return made_of(monkeypatch, Looked)


async def test_a_turn_is_looked_for(turns: list[Looked]) -> None:
    cluster = pair()
    small = cluster.workers["small"]
    small.turns.configure(0)
    async with cluster.running(), asyncio.timeout(30):
        answer = await cluster.generate("demo", [1], max_tokens=8)
        await cluster.settled()
    assert answer.writers == [0, 1] * 4
    assert (turns[0].looks, turns[0].rests) == (5 * small.stepper.steps, 0)
    assert not turns[0].held


async def test_what_was_sent_in_the_turn_before_is_in_the_first_step_of_one_that_was_looked_for(
    turns: list[Looked],
) -> None:
    assert await rows_of_a_first_step(turns, watches=True) == 2


async def test_a_turn_that_does_not_come_for_long_is_slept_through(
    turns: list[Looked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "WATCH", 0.0)
    cluster = pair()
    small = cluster.workers["small"]
    small.turns.configure(0)
    turns[0].needed = 10**9
    async with cluster.running(), asyncio.timeout(30):
        answer = await cluster.generate("demo", [1], max_tokens=8)
        await cluster.settled()
    assert answer.writers == [0, 1] * 4
    assert turns[0].rests == small.stepper.steps


async def test_a_turn_that_is_not_needed_any_more_is_looked_for_no_more(turns: list[Looked]) -> None:
    """Others would wait behind it for ever."""
    cluster = Cluster({"m": ScriptRunner([1], vocab_size=4, cycle=True)}, {"demo": Route(models=["m"])}, watches=True)
    cluster.workers["m"].turns.configure(0)
    turns[0].needed = 10**9
    async with cluster.running(), asyncio.timeout(30):
        rid, _ = cluster.submit("demo", [1], max_tokens=8)
        while not turns[0].looking:
            await asyncio.sleep(0)
        cluster.abort(rid, "demo")
        await cluster.settled()
        while turns[0].looking:
            await asyncio.sleep(0)
    assert cluster.workers["m"].stepper.steps == 0


@pytest.mark.parametrize("taken", [False, True])
async def test_hand_offs_leave_in_parts_where_models_take_turns(turns: list[Looked], taken: bool) -> None:
    cluster = pair()
    outbound = cluster.workers["small"].outbound
    parts: list[int] = []

    def together(most: int) -> AbstractContextManager[None]:
        parts.append(most)
        return nullcontext()

    outbound.connect(outbound._send, together)
    if taken:
        cluster.workers["small"].turns.configure(0)
        assert turns
    async with cluster.running(), asyncio.timeout(30):
        answers = [cluster.submit("demo", [1, n], max_tokens=4)[1] for n in range(3)]
        for answer in answers:
            await answer.done.wait()
        await cluster.settled()
    assert set(parts) == {worker.TOGETHER if taken else 0}


@pytest.mark.parametrize(
    ("watch", "cores", "ranks", "expected"),
    [("auto", 12, 1, True), ("auto", 11, 1, False), ("auto", 15, 2, False), ("on", 1, 1, True), ("off", 64, 1, False)],
)
def test_watching_takes_cores(
    monkeypatch: pytest.MonkeyPatch, watch: Literal["auto", "on", "off"], cores: int, ranks: int, expected: bool
) -> None:
    monkeypatch.setattr(main, "available_cores", lambda: float(cores))
    models = {"small": Model(path="s"), "large": Model(path="l", tensor_parallel=ranks)}
    assert main._watches(Config(models=models, rings=Rings(watch=watch))) == expected
