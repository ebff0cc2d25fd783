"""The turn that workers take, over processes as in a daemon."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import cast

import pytest

from ipc.messages import Message, PeerReq
from models.resident import StepRecord
from models.script import ScriptRunner
from tests.harness import Answer, Cluster
from tests.worker.resident import FakeResident
from tests.worker.test_pipeline import Held
from trouterd.child import Control
from trouterd.config import Config, Model, Route
from trouterd.worker import main
from trouterd.worker.turn import Turn, TurnError, whole_turn

WORKER = textwrap.dedent(
    """
    import asyncio, os, sys
    from pathlib import Path
    from trouterd.worker.turn import Turn

    async def main():
        folder, name, rounds, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        come = asyncio.Event()
        turn = Turn(os.open(folder / "lock", os.O_RDWR), come.set)
        (folder / f"{name}.here").touch()
        while len(list(folder.glob("*.here"))) < count:
            await asyncio.sleep(0.001)
        for _ in range(rounds):
            while not turn.take():
                await come.wait()
                come.clear()
            inside = folder / "inside"
            inside.open("x").close()
            with (folder / "log").open("a") as log:
                log.write(name)
            while not (any(folder.glob("*.done")) or count > 1 and turn.wanted()):
                await asyncio.sleep(0.001)
            inside.unlink()
            turn.give_back()
        (folder / f"{name}.done").touch()

    asyncio.run(main())
    """
)


@pytest.fixture
def file(tmp_path: Path) -> int:
    """Of turns, also by its name; closed by the system: that frees all locks of it."""
    return os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)


def start(folder: Path, name: str, rounds: int, count: int) -> subprocess.Popen[bytes]:
    """One of so many workers, which keep each turn until another one waits for the next or is done; one alone until `let_go`."""
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), name, str(rounds), str(count)])


def let_go(folder: Path) -> None:
    """Let whoever has the turn give it back."""
    (folder / "test.done").touch()


def holding(folder: Path) -> subprocess.Popen[bytes]:
    """A worker whose only turn has begun, and lasts until `let_go`."""
    holder = start(folder, "a", 1, 1)
    while not (folder / "log").exists():
        assert holder.poll() is None
    return holder


async def queue_is_taken(folder: Path) -> bool:
    """Whether some process is next, as another one sees it."""
    code = f"import fcntl; fcntl.lockf(open({str(folder / 'lock')!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=PIPE)
    _, error = await process.communicate()
    assert not error or b"BlockingIOError" in error, error
    return bool(error)


@pytest.mark.usefixtures("file")
def test_one_at_a_time_and_in_turn(tmp_path: Path) -> None:
    workers = [start(tmp_path, name, 15, 2) for name in "ab"]
    # "x" fails where somebody else is inside.
    assert [worker.wait() for worker in workers] == [0, 0]
    order = (tmp_path / "log").read_text()
    assert order in ("ab" * 15, "ba" * 15)


def test_a_turn_ends_with_its_process(tmp_path: Path, file: int) -> None:
    holder = holding(tmp_path)

    async def waiting() -> None:
        come = asyncio.Event()
        turn = Turn(file, come.set)
        assert not turn.take()
        assert not turn.take(), "it waits already"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        async with asyncio.timeout(30):
            await come.wait()
        assert turn.held
        assert turn.take()
        turn.give_back()
        assert turn.take()
        turn.give_back()

    asyncio.run(waiting())


def test_a_turn_that_is_not_wanted_any_more_is_given_back(tmp_path: Path, file: int) -> None:
    holder = holding(tmp_path)

    async def waiting() -> None:
        come = asyncio.Event()
        turn = Turn(file, come.set)
        assert not turn.take()
        let_go(tmp_path)
        await come.wait()
        turn.give_back()
        assert not turn.held

    asyncio.run(waiting())
    assert holder.wait() == 0
    assert start(tmp_path, "b", 1, 1).wait() == 0


async def test_a_turn_that_is_looked_for(tmp_path: Path, file: int) -> None:
    """Nobody is told of it, and whoever has one knows that it is wanted."""
    holder = holding(tmp_path)
    turn = Turn(file, lambda: pytest.fail("it is looked for"))
    assert not turn.take(look=True)
    assert not turn.come()
    assert await queue_is_taken(tmp_path)
    let_go(tmp_path)
    while not turn.come():
        await asyncio.sleep(0)
    assert turn.take(look=True)
    assert turn.used
    assert holder.wait() == 0
    assert not await queue_is_taken(tmp_path)
    turn.give_back()
    assert not turn.come(), "it is not looked for"


async def test_a_turn_that_is_not_looked_for_any_more(tmp_path: Path, file: int) -> None:
    holder = holding(tmp_path)
    turn = Turn(file, lambda: pytest.fail("it is looked for"))
    assert not turn.take(look=True)
    turn.leave()
    assert not await queue_is_taken(tmp_path)
    let_go(tmp_path)
    assert holder.wait() == 0
    assert not turn.come()
    assert not turn.held


async def test_who_rests_is_told(tmp_path: Path, file: int) -> None:
    holder, told = holding(tmp_path), asyncio.Event()
    turn = Turn(file, told.set)
    assert not turn.take(look=True)
    turn.rest()
    let_go(tmp_path)
    async with asyncio.timeout(30):
        await told.wait()
    assert turn.held
    assert holder.wait() == 0
    turn.rest()
    assert turn.take(), "there was nothing to wait for"


async def test_its_own_wait_is_kept_by_who_asks_whether_others_wait(tmp_path: Path, file: int) -> None:
    """Steps that were launched side by side are in flight yet when models begin to take turns."""
    holder = holding(tmp_path)
    turn = Turn(file, lambda: None)
    assert not turn.take()
    assert turn.wanted()
    try:
        assert await queue_is_taken(tmp_path)
    finally:
        holder.kill()
        holder.wait()


async def test_a_whole_turn_is_waited_for_and_kept(tmp_path: Path, file: int) -> None:
    """Nobody else has one meanwhile, and the next one comes when it ends."""
    holder, waits = holding(tmp_path), []

    def told(does: bool) -> None:
        waits.append(does)
        let_go(tmp_path)

    async with whole_turn(file, told):
        assert waits == [True, False]
        assert holder.wait() == 0
        (tmp_path / "a.here").unlink()
        other = start(tmp_path, "b", 1, 1)
        while not (tmp_path / "b.here").exists():
            assert other.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        assert (tmp_path / "log").read_text() == "a"
    assert other.wait() == 0
    assert (tmp_path / "log").read_text() == "ab"
    async with whole_turn(file, told):
        assert waits == [True, False], "it was free"


async def test_a_whole_turn_that_cannot_come_is_an_error(tmp_path: Path) -> None:
    file = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(TurnError, match=r"batching\.overlap: the file of turns cannot be locked: Bad file descriptor"):
        async with whole_turn(file, lambda waits: None):
            pass
    os.close(file)


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
    made: list[SlowTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(SlowTurn(*args)) or made[0])
    cluster = Cluster({"m": ScriptRunner([1], vocab_size=4, cycle=True)}, {"demo": Route(models=["m"])})
    worker = cluster.workers["m"]
    worker.turns.configure(0)
    async with cluster.running(), asyncio.timeout(30):
        await cluster.generate("demo", [1], max_tokens=9)
        await cluster.settled()
    steps = worker.observer.since(0.0)
    assert len(steps) == 9
    assert all(step.begin >= begun for step, begun in zip(steps, made[0].begun, strict=True))


async def test_what_was_sent_in_the_turn_before_is_in_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nobody has read it from the ring when that turn ends."""
    made: list[LoggedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(LoggedTurn(*args)) or made[0])
    device = FakeResident(ScriptRunner([1], vocab_size=4, cycle=True))
    cluster = Cluster({"m": device}, {"demo": Route(models=["m"])})
    cluster.workers["m"].turns.configure(0)
    made[0].on_begin = lambda: asyncio.get_running_loop().call_soon(cluster.submit, "demo", [1])
    cluster.submit("demo", [1])
    async with cluster.running(), asyncio.timeout(30):
        while not device.launched:
            await asyncio.sleep(0)
        made[0].on_begin = lambda: None
        assert len(device.launched[0]) == 2
        await cluster.settled()


async def test_what_comes_with_the_turn_is_asked_about_before_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose tokens the host decides waits for what is in flight: here a step that the device skips."""
    made: list[LoggedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(LoggedTurn(*args)) or made[0])
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
    made: list[LoggedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(LoggedTurn(*args)) or made[0])
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
    made: list[SharedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(SharedTurn(*args)) or made[0])
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
    made: list[SharedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(SharedTurn(*args)) or made[0])
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
    made: list[LoggedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(LoggedTurn(*args)) or made[0])
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
    made: list[LoggedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(LoggedTurn(*args)) or made[0])
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
    made: list[LoggedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(LoggedTurn(*args)) or made[0])
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
    made: list[SharedTurn] = []
    monkeypatch.setattr("trouterd.worker.turn.Turn", lambda *args: made.append(SharedTurn(*args)) or made[0])
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


async def test_a_start_whose_turn_cannot_come_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker that decodes is: the daemon ends only when it never got one to start."""

    def refused(*_: object) -> None:
        raise TurnError("batching.overlap: the file of turns cannot be locked: No locks available")

    monkeypatch.setattr(main, "load_model", refused)
    words: list[str] = []
    config = Config(models={"m": Model(path="m")})
    link = SimpleNamespace(boot=SimpleNamespace(role="m"), config=config, last_words=words.append)
    assert await main.run(cast(Control, link)) == 1
    assert words == ["batching.overlap: the file of turns cannot be locked: No locks available"]
