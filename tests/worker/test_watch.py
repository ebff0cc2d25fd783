"""Workers that stay awake while they wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ipc.messages import PeerReq
from models.script import ScriptRunner
from tests.harness import Cluster
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


async def test_who_has_no_request_sleeps(sleeps: list[asyncio.Event]) -> None:
    cluster = pair()
    async with cluster.running(), asyncio.timeout(30):
        await cluster.generate("demo", [1], max_tokens=4)
        await cluster.settled()
        sleeps.append(asyncio.Event())
        for each in cluster.workers.values():
            each._inbox.wake()
        await sleeps[0].wait()


class Looked:
    """A turn that comes when it has been looked for a number of times."""

    def __init__(self, file: int, granted: Callable[[], None]) -> None:
        del file, granted
        self.held = self.used = False
        self.left = 0
        self.looks = 0
        self.rests = 0

    def wanted(self) -> bool:
        return False

    def take(self, *, look: bool) -> bool:
        assert look
        if not self.held:
            self.left = 5
        self.used = self.held
        return self.held

    def come(self) -> bool:
        self.looks += 1
        if self.left:
            self.left -= 1
            self.held = not self.left
        return self.held

    def rest(self) -> None:
        self.rests += 1

    def leave(self) -> None:
        self.left = 0

    def give_back(self) -> None:
        self.held = self.used = False


async def test_a_turn_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Looked] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(Looked(*args)) or made[0])
    cluster = pair()
    small = cluster.workers["small"]
    small.turns.configure(0)
    async with cluster.running(), asyncio.timeout(30):
        answer = await cluster.generate("demo", [1], max_tokens=8)
        await cluster.settled()
    assert answer.writers == [0, 1] * 4
    turn = made[0]
    assert (turn.looks, turn.rests) == (5 * small.stepper.steps, 0)
    assert not turn.held
    assert not turn.left


@pytest.mark.parametrize(
    ("watch", "cores", "expected"), [("auto", 12, True), ("auto", 11, False), ("on", 1, True), ("off", 64, False)]
)
def test_watching_takes_cores(monkeypatch: pytest.MonkeyPatch, watch: str, cores: int, expected: bool) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    config = Config(models={name: Model(path=name) for name in ("small", "large")}, rings=Rings(watch=watch))  # type: ignore[arg-type]
    assert main._watches(config) == expected
