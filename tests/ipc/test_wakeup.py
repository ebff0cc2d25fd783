"""No wake is lost between two processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.ipc.rings import CORES, core


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sleeps", [3_000, pytest.param(600_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CORES)
def test_hammer(name: str, sleeps: int) -> None:
    core(name)
    command = [sys.executable, "-m", "tests.ipc.hammer", name, str(sleeps)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=850)
    counts = json.loads(result.stdout)
    assert counts["sleeps"] == sleeps
    assert counts["lost"] == 0
