"""A step's rows as attention sees them: contexts and new rows of its requests, over pages in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bench.step_size import StepSize
from models.batch import IntArray

_YOUNGEST = 100
"""Tokens of the shortest mixed context."""


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """Rows of one step on a device; all of int32, see `models.rows.Rows`."""

    positions: torch.Tensor
    """[T]"""
    leaders: torch.Tensor
    """[T]"""
    counts: torch.Tensor
    """[T]"""
    slots: torch.Tensor
    """[T]"""
    page_table: torch.Tensor
    """[requests, pages]"""
    keys: int
    """Of all requests, their new rows included: what has to be read once."""
    pages: int
    """That the table names."""

    @classmethod
    def of(
        cls, size: StepSize, context: int, *, mixed: bool, page_size: int, device: torch.device, seed: int = 0
    ) -> AttentionLoad:
        """The step of some requests.

        Args:
            size: requests, and new rows of each.
            context: tokens before them.
            mixed: contexts from `_YOUNGEST` tokens to as much above `context`, and numbers of rows in a geometric distribution,
                as in a daemon that routes requests of all ages: quantiles of both, dealt at random. Contexts have the given mean,
                rows about that.
            page_size: tokens.
            device: where.
            seed: of the order of pages, and of what is mixed.
        """
        generator = np.random.default_rng(seed)
        starts: IntArray = np.full(size.requests, context)
        counts: IntArray = np.full(size.requests, size.rows)
        if mixed:
            quantiles = (np.arange(size.requests) + 0.5) / size.requests
            youngest = min(_YOUNGEST, context)
            starts = generator.permutation(np.rint(youngest + 2 * (context - youngest) * quantiles).astype(np.int64))
            counts = generator.permutation(_geometric(quantiles, size.rows))
        ends = starts + counts
        each = -(-int(ends.max()) // page_size)
        firsts = np.cumsum(counts) - counts
        spread = np.zeros(int(counts.sum()), np.int64)
        spread[firsts] = counts
        leaders = np.repeat(firsts, counts)

        def put(values: IntArray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(device)

        return cls(
            positions=put(np.repeat(starts, counts) + np.arange(len(spread)) - leaders),
            leaders=put(leaders),
            counts=put(spread),
            slots=put(np.repeat(np.arange(size.requests), counts)),
            page_table=put(generator.permutation(size.requests * each).reshape(size.requests, each)),
            keys=int(ends.sum()),
            pages=size.requests * each,
        )


def _geometric(quantiles: npt.NDArray[np.float64], mean: int) -> IntArray:
    """Of the numbers of trials until the first success, where that takes so many in the mean."""
    if mean == 1:
        return np.ones(len(quantiles), np.int64)
    trials: IntArray = np.ceil(np.log1p(-quantiles) / np.log1p(-1 / mean)).astype(np.int64)
    return trials
