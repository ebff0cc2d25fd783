"""The turn that workers take, over processes as in a daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import cast

import pytest

from trouterd.child import Control
from trouterd.config import Config, Model
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


async def test_who_is_not_next_is_told_although_it_would_look(tmp_path: Path, file: int) -> None:
    """Whoever looks most often would be next otherwise."""
    holder, told = holding(tmp_path), asyncio.Event()
    turn = Turn(file, told.set)
    (tmp_path / "a.here").unlink()
    other = start(tmp_path, "b", 1, 1)
    while not await queue_is_taken(tmp_path):
        assert other.poll() is None
    assert not turn.take(look=True)
    let_go(tmp_path)
    async with asyncio.timeout(30):
        await told.wait()
    assert [holder.wait(), other.wait()] == [0, 0]
    assert (tmp_path / "log").read_text() == "ab"
    turn.give_back()


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
