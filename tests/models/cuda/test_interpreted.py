"""Runs the kernels' numerics on the CPU: in a process of its own, since Triton decides at import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = {
    "interpreted.py": 120,
    "interpreted_head.py": 120,
    "interpreted_split.py": 120,
    "interpreted_steps.py": 400,
}
"""Seconds that one test of each may take."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("", marks=pytest.mark.slow)])
def test_kernels_under_the_interpreter(name: str, marks: str) -> None:
    # Older interpreters read scalars in a way that new versions of numpy refuse.
    pytest.importorskip("triton", minversion="3.9")
    suite = Path(__file__).with_name(name)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            marks,
            "--timeout",
            str(SUITES[name]),
            str(suite),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=suite.parents[3],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
