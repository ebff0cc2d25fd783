"""Split models on real GPUs; needs two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.models.parallel import on_gpus
from tests.models.parallel.leading_process import PATIENCE, ROOT, gone
from tests.models.parallel.test_split_faults import Begin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(200),
]


@pytest.mark.parametrize("check", on_gpus.CHECKS)
def test_split_over_two(check: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", on_gpus.__name__, check, "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]


def test_a_killed_rank_ends_the_worker_although_its_collectives_hang(begin: Begin) -> None:
    worker = begin("hash", 2, "cuda")
    worker.until("step")
    os.kill(worker.pids[0], signal.SIGKILL)
    assert worker.process.wait(PATIENCE) == 1
    assert f"rank 1 (pid {worker.pids[0]}) was killed by SIGKILL" in worker.log()


def test_ranks_end_with_the_worker(begin: Begin) -> None:
    worker = begin("hash", 2, "cuda")
    worker.until("step")
    worker.process.kill()
    assert all(gone(pid) for pid in worker.pids)
