"""What happens when a rank is killed, fails or cannot start, with real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.models.parallel.leading_process import PATIENCE, Leading, gone

Begin = Callable[..., Leading]


def test_a_killed_rank_ends_the_worker(begin: Begin) -> None:
    worker = begin("hash", 2)
    worker.until("step")
    os.kill(worker.pids[0], signal.SIGKILL)
    assert worker.process.wait(PATIENCE) == 1
    worker.until(f"last words: large: rank 1 (pid {worker.pids[0]}) was killed by SIGKILL")
    log = worker.log()
    assert f"CRITICAL large trouterd.worker.rank_processes: large: rank 1 (pid {worker.pids[0]}) was killed" in log
    assert log.count("ending with it") == 1


def test_ranks_end_with_the_worker_even_where_they_hang(begin: Begin) -> None:
    worker = begin("hash", 2)
    worker.until("step")
    os.kill(worker.pids[0], signal.SIGSTOP)
    worker.process.kill()
    assert all(gone(pid) for pid in worker.pids)


@pytest.mark.slow
def test_a_step_that_fails_on_a_rank_ends_the_worker(begin: Begin) -> None:
    worker = begin("fail", 2)
    assert worker.process.wait(PATIENCE) == 1
    log = worker.log()
    assert "rank 1 (pid" in log
    assert "exited with code 1: ValueError: a step fails" in log


@pytest.mark.slow
def test_a_rank_lost_while_others_wait_for_it_ends_the_worker(begin: Begin) -> None:
    worker = begin("hang", 2)
    os.kill(worker.pids[0], signal.SIGKILL)
    assert worker.process.wait(PATIENCE) == 1
    assert "was killed by SIGKILL" in worker.log()


@pytest.mark.slow
def test_a_worker_that_ends_by_itself_loses_nobody(begin: Begin) -> None:
    worker = begin("brief", 2)
    assert worker.process.wait(PATIENCE) == 7
    assert gone(worker.pids[0])
    log = worker.log()
    assert "CRITICAL" not in log
    assert "ending with it" not in log
