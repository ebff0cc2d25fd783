"""Thresholds that cannot deadlock, and the rule of the launch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouterd.batching.launch import Reason, clamp, feasible, reason, stranded


def can_deadlock(thresholds: list[int], active: int) -> bool:
    """Whether the requests can be spread so that no model reaches its threshold: fill each up to one below."""
    return sum(threshold - 1 for threshold in thresholds) >= active


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 20))
def test_feasible_is_what_cannot_deadlock(thresholds: list[int], active: int) -> None:
    assert feasible(thresholds, active) != can_deadlock(thresholds, active)


@given(st.lists(st.integers(-3, 40), min_size=1, max_size=4), st.integers(0, 30), st.none() | st.integers(1, 40))
def test_clamp(thresholds: list[int], active: int, most: int | None) -> None:
    found = clamp(thresholds, active, most)
    assert feasible(found, active)
    assert all(1 <= threshold <= max(active, 1) for threshold in found)
    assert most is None or max(found) <= most
    assert clamp(found, active, most) == found
    bounded = [threshold for threshold in thresholds if 1 <= threshold <= min(max(active, 1), most or active or 1)]
    if len(bounded) == len(thresholds) and feasible(thresholds, active):
        assert list(found) == thresholds
    # What is taken away is no more than what was too much.
    upper = max(1, active if most is None else min(active, most))
    wanted = [min(max(threshold, 1), upper) for threshold in thresholds]
    assert sum(found) == min(sum(wanted), max(active, 1) - 1 + len(wanted))


def test_the_largest_gives_way() -> None:
    assert clamp((2, 9), 4) == (2, 3)
    assert clamp((4, 4, 1), 4) == (2, 3, 1)
    assert clamp((1, 9), 8, max_batch=5) == (1, 5)
    assert clamp((3, 3), 1) == clamp((3, 3), 0) == (1, 1)


@pytest.mark.parametrize(
    ("ready", "threshold", "waited", "linger", "expected"),
    [
        (0, 1, 99.0, 1.0, None),
        (2, 2, 0.0, None, Reason.THRESHOLD),
        (1, 2, 9.0, None, None),
        (1, 2, 0.9, 1.0, None),
        (1, 2, 1.0, 1.0, Reason.LINGER),
        (2, 2, 1.0, 1.0, Reason.THRESHOLD),
        (1, 2, 0.0, 0.0, Reason.LINGER),
    ],
)
def test_reason(ready: int, threshold: int, waited: float, linger: float | None, expected: Reason | None) -> None:
    assert reason(ready, threshold, waited, linger) is expected


def test_stranded() -> None:
    assert stranded((0, 0)) is None
    assert stranded((1, 3, 2)) == 1
    assert stranded((2, 2)) == 0
