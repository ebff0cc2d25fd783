"""Paged attention by itself, against softmax written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.attention import PagedAttention
from models.batch import Batch

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 16


def attention(pages: int) -> PagedAttention:
    return PagedAttention(
        layers=1,
        num_pages=pages,
        page_size=PAGE,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def one_request(length: int, pages: int) -> Batch:
    rows = np.arange(length)
    table = np.random.default_rng(length).permutation(pages).astype(np.int32)[None]
    return Batch(rows, rows, rows * 0, table, rows, rows)


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[T, heads * dim] causal attention of one request whose rows are q, k, v."""
    group = HEADS // KV_HEADS
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * DIM**-0.5
    scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize("width", [0.1, 1.0, 20.0])
def test_flat_and_peaked_scores(width: float) -> None:
    """Also where most weights underflow."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(300, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    paged = attention(20)
    result = paged.prepare(one_request(300, 20))(0, q * width, k * width, v)
    assert (result - written_out(q * width, k * width, v)).abs().max() < (1e-5 if width <= 1 else 1e-3)


def test_what_a_page_held_before_adds_exact_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(150, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS))
    paged = attention(20)
    everything = one_request(20 * PAGE, 20)
    paged.prepare(everything)(
        0, torch.zeros(320, HEADS, DIM), torch.full((320, KV_HEADS, DIM), 3.0), torch.full((320, KV_HEADS, DIM), 1e30)
    )
    result = paged.prepare(one_request(150, 20))(0, q, k, torch.zeros(150, KV_HEADS, DIM))
    assert result.count_nonzero() == 0


def test_padding_rows_are_zero_and_write_nothing() -> None:
    paged = attention(4)
    step = paged.prepare(one_request(3, 4))
    ones = torch.ones(8, KV_HEADS, DIM)
    result = step(0, torch.ones(8, HEADS, DIM), ones, ones)
    assert (result[:3] == 1).all()
    assert result[3:].count_nonzero() == 0
    assert sum(int(pool.count_nonzero()) for pool in paged._values) == 3 * KV_HEADS * DIM
