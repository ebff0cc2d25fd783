"""Axes of plots that can be read."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from bench.log_axes import plain, plain_numbers


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.9, 60, ["1", "2", "5", "10", "20", "50"]),
        (0.86, 1.3, ["1", "1.2"]),
        (900, 21_000, ["1,000", "2,000", "5,000", "10,000", "20,000"]),
    ],
)
def test_numbers_of_an_axis(low: float, high: float, labels: list[str]) -> None:
    axes = Figure().subplots()
    axes.plot([1, 2], [low, high])
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    plain_numbers(axes.yaxis)
    shown = [
        label
        for place, label in zip(axes.get_yticks(), axes.yaxis.get_ticklabels(), strict=True)
        if low <= place <= high
    ]
    assert [label.get_text() for label in shown] == labels
    assert not list(axes.yaxis.get_minor_locator()())


def test_numbers() -> None:
    assert [plain(value) for value in (0.05, 0.5, 1.0, 20.0, 20_000.0, 1e6)] == [
        *("0.05", "0.5", "1", "20", "20,000", "1,000,000"),
    ]
