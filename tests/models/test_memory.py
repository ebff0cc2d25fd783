"""Sizing of KV pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.memory import Footprint, MemoryBudgetError, common_pages, kv_budget

SIZES = st.integers(0, 1000)


def test_documented_example() -> None:
    assert kv_budget(100, 0.9, [Footprint(weights=40, graphs=8, workspace=2, page=1)]) == 40


def test_two_models_share_one_budget() -> None:
    small = Footprint(weights=10, graphs=5, workspace=5, page=3)
    large = Footprint(weights=30, graphs=5, workspace=5, page=7)
    assert common_pages(100, 0.9, [small, large]) == 3


@given(
    st.integers(1, 4000),
    st.floats(0.01, 1.0),
    st.lists(st.builds(Footprint, SIZES, SIZES, SIZES, st.integers(1, 50)), min_size=1, max_size=3),
)
def test_pages_fit_and_no_more_would(total: int, fraction: float, models: list[Footprint]) -> None:
    share = round(total * fraction)
    fixed, page = sum(m.fixed for m in models), sum(m.page for m in models)
    try:
        pages = common_pages(total, fraction, models)
    except MemoryBudgetError:
        assert fixed + page > share
    else:
        assert fixed + pages * page <= share < fixed + (pages + 1) * page


def test_suggested_fractions_work() -> None:
    model = Footprint(weights=500, graphs=80, workspace=20, page=10)
    with pytest.raises(MemoryBudgetError, match=r"smallest fraction that leaves room for KV is 0\.61"):
        common_pages(1000, 0.6, [model])
    assert common_pages(1000, 0.61, [model]) == 1
    with pytest.raises(MemoryBudgetError, match=r"largest fraction that fits is 0\.933"):
        common_pages(1000, 0.98, [model], available=933)
    assert common_pages(1000, 0.933, [model], available=933) == 33
    with pytest.raises(MemoryBudgetError, match="too small"):
        common_pages(600, 0.9, [model])
