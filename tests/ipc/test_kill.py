"""Either end is killed at any moment: nothing accepted is lost, nothing is torn, and no wake is missing."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys

import pytest

from tests.ipc.build import HERE, extension
from tests.ipc.rings import CORES, core

SLOW = pytest.mark.slow
PRODUCER_POINTS = ("header", "payload", "before_tail", "after_tail", "wake", "after_wake")
CONSUMER_POINTS = ("before_head", "after_head", "wake")
BATCH = 16


def kill_fuzz(end: str, core_name: str, kills: int, *point: str) -> dict[str, int]:
    seed = secrets.randbits(30)
    command = [sys.executable, "-m", "tests.ipc.kill_fuzz", end, core_name, str(kills), str(seed), *point]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[-4000:]}"
    counts = {key: int(value) for key, value in json.loads(result.stdout).items()}
    assert counts["kills"] == kills
    assert counts["timer_rescues"] == 0
    return counts


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [25, pytest.param(300, marks=SLOW)])
@pytest.mark.parametrize("name", CORES)
def test_producer_killed_at_random(name: str, kills: int) -> None:
    core(name)
    counts = kill_fuzz("producer", name, kills)
    assert counts["repeats"] <= kills
    assert counts["unread"] == 0
    assert counts["messages"] > kills


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=SLOW)])
@pytest.mark.parametrize("point", PRODUCER_POINTS)
def test_producer_killed_at_each_step(point: str, kills: int) -> None:
    library = extension("-include", str(HERE / "points.h"))
    counts = kill_fuzz("producer", "c", kills, point, str(library))
    # Dead between publishing and waking: the message is there and only the supervisor's kick announces it.
    if point == "wake":
        assert counts["needed_kick"] > 0
    if point in ("header", "payload", "before_tail"):
        assert counts["repeats"] == 0


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [25, pytest.param(800, marks=SLOW)])
def test_python_producer_killed_at_any_store(kills: int) -> None:
    counts = kill_fuzz("producer", "python", kills, "store")
    assert counts["messages"] > kills


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [25, pytest.param(300, marks=SLOW)])
@pytest.mark.parametrize("name", CORES)
def test_consumer_killed_at_random(name: str, kills: int) -> None:
    core(name)
    counts = kill_fuzz("consumer", name, kills)
    assert counts["repeats"] <= BATCH * kills
    assert counts["most_repeats"] <= BATCH
    assert counts["messages"] > kills


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=SLOW)])
@pytest.mark.parametrize("point", CONSUMER_POINTS)
def test_consumer_killed_at_each_step(point: str, kills: int) -> None:
    library = extension("-include", str(HERE / "points.h"))
    counts = kill_fuzz("consumer", "c", kills, point, str(library))
    if point == "before_head":
        assert counts["repeats"] >= kills
    else:
        assert counts["repeats"] == 0


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [25, pytest.param(400, marks=SLOW)])
def test_python_consumer_killed_at_any_store(kills: int) -> None:
    counts = kill_fuzz("consumer", "python", kills, "store")
    assert counts["most_repeats"] <= BATCH
