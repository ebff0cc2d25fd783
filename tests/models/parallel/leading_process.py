"""Processes of `tests.models.parallel.leading`, and whether others have ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.models.parallel import leading
from trouterd.supervisor.process import process_state

ROOT = Path(__file__).parents[3]
PATIENCE = 50.0
"""Seconds after which a test gives up waiting; not a measure of speed."""


class Leading:
    """The process of the first rank, and through it the others."""

    def __init__(self, kind: str, world: int, device: str = "cpu") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", leading.__name__, kind, str(world), device],
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
        return self.process.communicate(timeout=PATIENCE)[1]


def gone(pid: int) -> bool:
    """Whether a process that is not our child ends."""
    deadline = time.monotonic() + PATIENCE
    while process_state(pid) not in ("", "Z"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
