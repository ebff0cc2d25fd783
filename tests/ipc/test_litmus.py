"""Publishing against going to sleep: without full ordering on both sides each can miss the other.

Stress tests of a whole ring hardly ever meet that moment; a loop over nothing but the four accesses does. The same loop runs
without the ordering too, where the miss shows what a pass is worth. Whether it shows is up to the host: one that runs both sides
on the same core, or on busy ones, may never reorder anything, and such a control is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ipc.fence import register_membarrier
from tests.ipc.build import driver, run_driver

FULL = pytest.mark.slow
MAX_CONTROL_RUNS = 20


def shown(missed: bool) -> None:
    """Skips a control that did not show the miss: this host proves nothing, which is no fault of the rings."""
    if not missed:
        pytest.skip(
            "both sides of this host never overtook each other: passes of the tests beside this one prove little"
        )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [100_000, pytest.param(2_000_000, marks=FULL)])
def test_c_core_misses_no_wake(rounds: int) -> None:
    assert run_driver(driver(), "litmus", rounds, timeout=500)["lost"] == 0


@pytest.mark.timeout(600)
def test_c_core_without_sequential_consistency_misses_wakes() -> None:
    relaxed = driver("-DRING_SC=__ATOMIC_RELAXED")
    shown(any(run_driver(relaxed, "litmus", 100_000)["lost"] for _ in range(MAX_CONTROL_RUNS)))


def python_litmus(fences: str, rounds: int, trials: int) -> dict[str, int]:
    """Trials done and rounds in which both sides read the old value, with two processes over one mapping."""
    command = [sys.executable, "-m", "tests.ipc.store_buffer", fences, str(rounds), str(trials)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return {key: int(value) for key, value in json.loads(result.stdout).items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trials", [2, pytest.param(60, marks=FULL)])
@pytest.mark.parametrize("fences", ["lock", "membarrier"])
def test_python_fences_miss_no_wake(fences: str, trials: int) -> None:
    if fences == "membarrier" and not register_membarrier():
        pytest.skip("membarrier is not available here")
    counts = python_litmus(fences, 20_000, trials)
    assert counts["trials"] > 0
    assert counts["stale"] == 0


def test_python_without_a_fence_misses_wakes() -> None:
    shown(python_litmus("none", 20_000, MAX_CONTROL_RUNS)["stale"] > 0)
