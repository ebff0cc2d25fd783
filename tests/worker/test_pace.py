"""What steps have taken decides when the next one is queued and how long the loop sleeps."""

from __future__ import annotations

import pytest

from trouterd.worker.pace import Pace


def learnt(seconds: float, rows: int = 8) -> Pace:
    pace = Pace()
    for _ in range(3):
        pace.observe(rows, seconds)
    return pace


def test_nothing_is_expected_of_sizes_that_have_not_run() -> None:
    pace = learnt(0.02)
    assert pace.expected(8) == pace.expected(15) == pytest.approx(0.02)
    assert pace.expected(16) == pace.expected(7) == 0
    assert pace.queue_from(64) == 0
    assert pace.nap(64, 0.0) == 0


def test_short_steps_are_watched_and_queued_at_once() -> None:
    pace = learnt(5e-4)
    assert pace.queue_from(8) == 0
    assert [pace.nap(8, elapsed * 1e-4) for elapsed in range(10)] == [0] * 10


def test_long_steps_are_slept_through_and_the_next_one_is_queued_towards_their_end() -> None:
    pace = learnt(0.017)
    assert 0.012 < pace.queue_from(8) < 0.015
    assert pace.nap(8, 0.0) == pytest.approx(0.0155)
    assert pace.nap(8, 0.01) == pytest.approx(0.0055)
    # The last two milliseconds are watched: a timer of the loop could miss the end by as much.
    assert pace.nap(8, 0.015) == 0


def test_a_step_that_is_a_little_late_is_watched() -> None:
    pace = learnt(0.02)
    assert [pace.nap(8, elapsed) for elapsed in (0.02, 0.0205, 0.0229)] == [0, 0, 0]
    assert pace.nap(8, 0.024) == pytest.approx(0.0012)


def test_a_step_that_is_over_its_time_is_looked_at_less_and_less() -> None:
    pace = learnt(5e-4)
    assert pace.nap(8, 0.01) == 0
    assert pace.nap(8, 0.1) == pytest.approx(0.005)
    assert pace.nap(8, 0.3) == pytest.approx(0.015)


def test_the_latest_steps_count_most() -> None:
    pace = learnt(0.01)
    for _ in range(12):
        pace.observe(8, 0.02)
    assert pace.expected(8) == pytest.approx(0.02, rel=0.05)


def test_a_first_step_that_took_very_long_costs_no_long_sleep() -> None:
    """It compiles kernels: the steps after it are far shorter."""
    pace = learnt(1.5)
    assert pace.nap(8, 0.0) == pytest.approx(0.02)
    pace.observe(8, 0.08)
    assert pace.expected(8) == pytest.approx(0.08)


def test_one_outlier_moves_the_expectation_little() -> None:
    pace = learnt(0.01)
    pace.observe(8, 3.0)
    assert pace.expected(8) <= 0.0121
