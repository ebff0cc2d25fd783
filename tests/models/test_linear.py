"""Row plans: what the start-up check concludes from kernels of several kinds, and products under a plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from models import linear as module
from models.linear import RowPlan, linear, plan_batched, plan_rows

PLAN = RowPlan((4, 8, 16, 32))


@given(st.integers(0, 200))
def test_padded_counts_are_allowed_and_tight(rows: int) -> None:
    padded = PLAN.padded(rows)
    sizes = [end - start for start, end in PLAN.pieces(padded)]
    assert sum(sizes) == padded >= rows
    assert padded > 0
    assert all(size in PLAN.counts for size in sizes)
    assert padded - rows < 16 or rows == 0


@given(st.integers(1, 100), st.booleans())
def test_linear_equals_torch(rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(PLAN.padded(rows), 24, generator=generator)
    weight, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator) if biased else None
    assert (linear(x, weight, PLAN, bias) - F.linear(x, weight, bias)).abs().max() < 1e-4


@pytest.mark.parametrize(("width", "rows"), [(96, 288), (64, 260), (24, 40)])
def test_rows_keep_their_bits_under_the_plan_of_this_machine(width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, width, generator=generator)
    plan = plan_rows([weight])
    x = torch.randn(300, width, generator=generator)
    full = linear(torch.cat((x, x.new_zeros(plan.padded(300) - 300, width))), weight, plan)
    for count in (1, 2, 3, 5, 17, 64, 100, 257):
        part = x[37 : 37 + count] if count < 200 else x[:count]
        padded = torch.cat((part, torch.ones(plan.padded(count) - count, width)))
        start = 37 if count < 200 else 0
        assert torch.equal(linear(padded, weight, plan)[:count], full[start : start + count])


def conclude(monkeypatch: pytest.MonkeyPatch, fault: object) -> tuple[int, ...]:
    """The counts that the check allows when kernels add `fault(x)` to a product."""
    monkeypatch.setattr(module.F, "linear", lambda x, weight, bias=None: x @ weight.T + fault(x))  # type: ignore[operator]
    return plan_rows([torch.eye(8)]).counts


def test_kernels_that_differ_below_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conclude(monkeypatch, lambda x: 0.0 if len(x) >= 16 else 1.0)[0] == 16


def test_kernels_that_differ_at_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conclude(monkeypatch, len) == (32,)


def test_kernels_that_differ_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the 16th place of a tile on: tiles of 16 rows are still good."""
    assert conclude(monkeypatch, lambda x: (torch.arange(len(x))[:, None] >= 16) + len(x)) == (16,)


def test_kernels_whose_rows_all_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conclude(monkeypatch, lambda x: torch.arange(len(x))[:, None]) == (1,)


def test_plans_combine_to_what_both_allow() -> None:
    assert RowPlan((4, 8, 16)).agree(RowPlan((8, 16, 32))).counts == (8, 16)
    assert RowPlan((16,)).agree(RowPlan((32,))).counts == (1,)


def test_batched_products_of_this_machine_have_a_plan() -> None:
    for transposed in (True, False):
        plan = plan_batched(128, 16, transposed=transposed, device=torch.device("cpu"))
        assert 1 <= plan.counts[0] <= 32
