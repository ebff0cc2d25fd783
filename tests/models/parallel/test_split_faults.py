"""What happens when a rank is killed, fails or cannot start, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models.parallel import leading
from trouterd.supervisor.process import process_state

ROOT = Path(__file__).parents[3]


class Leading:
    """The process of the first rank, and through it the others."""

    def __init__(self, kind: str, world: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", leading.__name__, kind, str(world)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids = [int(word) for word in self.line().split()]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def until(self, word: str) -> None:
        while (line := self.line()) != word:
            assert line, f"ended before it said {word!r}: {self.log()}"

    def log(self) -> str:
        """What it and its ranks have logged; waits for the end of all."""
        return self.process.communicate(timeout=20)[1]


@pytest.fixture
def begin() -> Iterator[Callable[[str, int], Leading]]:
    started: list[Leading] = []

    def start(kind: str, world: int) -> Leading:
        started.append(Leading(kind, world))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def gone(pid: int, within: float) -> bool:
    """Whether a process that is not our child ends in time."""
    deadline = time.monotonic() + within
    while process_state(pid) not in ("", "Z"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_killed_rank_ends_the_worker(begin: Callable[[str, int], Leading]) -> None:
    worker = begin("hash", 2)
    worker.until("step")
    os.kill(worker.pids[0], signal.SIGKILL)
    killed = time.monotonic()
    assert worker.process.wait(5) == 1
    assert time.monotonic() - killed < 2
    log = worker.log()
    assert f"CRITICAL large trouterd.worker.rank_processes: large: rank 1 (pid {worker.pids[0]}) was killed" in log
    assert log.count("ending with it") == 1


def test_ranks_end_with_the_worker_even_where_they_hang(begin: Callable[[str, int], Leading]) -> None:
    worker = begin("hash", 2)
    worker.until("step")
    os.kill(worker.pids[0], signal.SIGSTOP)
    worker.process.kill()
    assert all(gone(pid, 1) for pid in worker.pids)


def test_a_step_that_fails_on_a_rank_ends_the_worker(begin: Callable[[str, int], Leading]) -> None:
    worker = begin("fail", 2)
    assert worker.process.wait(20) == 1
    log = worker.log()
    assert "rank 1 (pid" in log
    assert "exited with code 1: ValueError: a step fails" in log


def test_a_rank_lost_while_others_wait_for_it_ends_the_worker(begin: Callable[[str, int], Leading]) -> None:
    worker = begin("hang", 2)
    os.kill(worker.pids[0], signal.SIGKILL)
    assert worker.process.wait(20) == 1
    assert "was killed by SIGKILL" in worker.log()
