"""The C core with both ends as threads, under sanitizers, and as a hammer on the way to sleep."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.ipc.build import driver, run_driver

THREAD = ("-fsanitize=thread", "-g")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
SLOW = pytest.mark.slow
NEAR_2_32 = (1 << 32) - 4000
NEAR_2_63 = (1 << 63) - 4000


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ((), 100_000),
        (THREAD, 20_000),
        (ADDRESS, 50_000),
        pytest.param((), 5_000_000, marks=SLOW),
        pytest.param(THREAD, 5_000_000, marks=SLOW),
        pytest.param(ADDRESS, 5_000_000, marks=SLOW),
    ],
)
@pytest.mark.parametrize("start", [NEAR_2_32, NEAR_2_63])
def test_every_message_arrives_whole_and_in_order(options: tuple[str, ...], messages: int, start: int) -> None:
    counts = run_driver(driver(*options), "stream", messages, 1, start, timeout=1700)
    assert counts["lost"] == 0
    assert counts["sleeps"] > 0


def test_thread_sanitizer_sees_a_missing_order() -> None:
    program = driver(*THREAD, "-DRING_SC=__ATOMIC_RELAXED")
    options = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    command = [program, "stream", "20000", "1", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=options)
    assert "data race" in result.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("options", "sleeps"),
    [
        ((), 30_000),
        (THREAD, 10_000),
        pytest.param((), 1_000_000, marks=SLOW),
        pytest.param(THREAD, 500_000, marks=SLOW),
    ],
)
def test_no_wake_is_lost(options: tuple[str, ...], sleeps: int) -> None:
    counts = run_driver(driver(*options), "hammer", sleeps, timeout=1700)
    assert counts["sleeps"] >= sleeps
    assert counts["lost"] == 0
