"""Models that take turns in a whole daemon: killed, stopped and started again, and told to run side by side meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
import struct
import time
from pathlib import Path

import aiohttp
import pytest

from tests.daemon.instance import Instance, complete, expected, gone, scripts, serving, stream
from tests.daemon.link import Link
from trouterd.supervisor.process import process_state

TURNS = "overlap = false\nmode = 'eager'"
SLEEPS, WATCHES = 'watch = "off"', 'watch = "on"'
"""What workers do that wait for their turn."""
FLOCK = "hhqqi"
"""Of struct flock: type, whence, start, length, pid."""
SLACK = 1e-3
"""Seconds by which two processes may be told of the same moment apart."""


async def side_by_side(link: Link, since: float) -> float:
    """The longest time for which steps of both models that ended after `since` ran beside each other, seconds."""
    small, large = [
        [
            (begin, begin + seconds)
            for begin, seconds, _ in (await link.call("batching-steps", since=since)).result[name]
        ]
        for name in ("small", "large")
    ]
    assert len(small) > 3
    assert len(large) > 3
    pairs = itertools.product(small, large)
    return max(min(one[1], other[1]) - max(one[0], other[0]) for one, other in pairs)


async def both(daemon: Instance, count: int) -> None:
    """A stream of each model, whole."""
    async with daemon.session(force_close=True) as session:
        for answer in await asyncio.gather(*(stream(session, name, max_tokens=count) for name in ("small", "large"))):
            assert (answer.finish, len(answer.text)) == ("length", count), answer


async def load(daemon: Instance, stop: asyncio.Event) -> None:
    """Streams, whatever becomes of them, until told to stop."""
    async with daemon.session(force_close=True) as session:
        while not stop.is_set():
            with contextlib.suppress(aiohttp.ClientError):
                await stream(session, max_tokens=32)


@pytest.mark.parametrize("rings", [SLEEPS, WATCHES])
async def test_turns_outlive_every_process(tmp_path: Path, rings: str) -> None:
    """Each of them is killed under load. Models take turns afterwards, whoever had the turn, and all that was held is free."""
    config = scripts(tmp_path, delay_ms=10.0, batching=TURNS, rings=rings, supervision="restart_backoff = 0.05")
    async with serving(tmp_path, config) as daemon:
        stop, link = asyncio.Event(), await Link.open(daemon)
        streams = [asyncio.create_task(load(daemon, stop)) for _ in range(4)]
        for name in ("large", "small", "api", "large"):
            await daemon.kill(name)
            await daemon.ready()
            begun = time.monotonic()
            await both(daemon, 16)
            assert await side_by_side(link, begun) < SLACK
        stop.set()
        await asyncio.gather(*streams)
        await daemon.idle()
        link.writer.close()
        assert await daemon.stop() == 0


def whose_turn(daemon: Instance) -> int:
    """The process that has the turn; 0: nobody."""
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        if "turns of trouterd" in os.readlink(link):  # noqa: PTH115 - a magic link, not a path
            file = os.open(link, os.O_RDWR)
            asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            kind, *_, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
            os.close(file)
            return 0 if kind == fcntl.F_UNLCK else int(pid)
    raise AssertionError("no file of turns")


async def stop_in_its_turn(daemon: Instance, pid: int) -> None:
    """SIGSTOP for a worker while it has the turn."""
    async with asyncio.timeout(30):
        while True:
            if whose_turn(daemon) == pid:
                os.kill(pid, signal.SIGSTOP)
                while process_state(pid) != "T":
                    await asyncio.sleep(0.001)
                if whose_turn(daemon) == pid:
                    return
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.001)


async def test_a_turn_that_is_never_given_back_does_not_keep_the_daemon(tmp_path: Path) -> None:
    """Its worker is stopped in it: the others wait, a kill lets them go on, and the daemon ends in time."""
    config = scripts(tmp_path, delay_ms=50.0, batching=TURNS, server="drain_timeout = 1.0")
    async with serving(tmp_path, config) as daemon, daemon.session(force_close=True) as session:
        pids = await daemon.pids()
        first = asyncio.create_task(stream(session, "large", max_tokens=1000))
        await stop_in_its_turn(daemon, pids["large"])
        second = asyncio.create_task(complete(session, "small", max_tokens=4))
        await daemon.logged("large", "has not answered")
        assert not second.done()
        os.kill(pids["large"], signal.SIGKILL)
        assert (await first).error
        assert (await second)[0] == 200
        await daemon.ready()
        pids = await daemon.pids()
        last = asyncio.create_task(stream(session, "large", max_tokens=1000))
        await stop_in_its_turn(daemon, pids["large"])
        assert await daemon.stop() == 1
        await gone(pids.values())
        await asyncio.gather(last, return_exceptions=True)


@pytest.mark.parametrize("rings", [SLEEPS, WATCHES])
async def test_overlap_is_changed_again_and_again(tmp_path: Path, rings: str) -> None:
    """No stream notices, and the last word counts."""
    async with serving(tmp_path, scripts(tmp_path, delay_ms=5.0, batching=TURNS, rings=rings)) as daemon:
        link = await Link.open(daemon)
        async with daemon.session() as session:
            streams = [asyncio.create_task(stream(session, max_tokens=64)) for _ in range(8)]
            values = itertools.cycle([True, False])
            while not all(task.done() for task in streams):
                assert not (await link.set("batching.overlap", next(values))).error
            assert {answer.text for answer in await asyncio.gather(*streams)} == {expected(64)}
        assert not (await link.set("batching.overlap", True)).error
        begun = time.monotonic()
        await both(daemon, 32)
        assert await side_by_side(link, begun) > SLACK
        assert not (await link.set("batching.overlap", False)).error
        begun = time.monotonic()
        await both(daemon, 32)
        assert await side_by_side(link, begun) < SLACK
        link.writer.close()
        assert await daemon.stop() == 0
