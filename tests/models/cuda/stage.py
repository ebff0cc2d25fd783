"""Steps for a reference runner and a row decoder alike: every slot has all its pages, shuffled, from the start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from models.batch import Batch
from models.rows import Rows, Runs

Run = tuple[int, int, list[int]]
"""Slot, position of the first token, token ids."""


def page_table(slots: int, context: int, page_size: int, seed: int = 0) -> np.ndarray:
    """[slots, pages] int32, every page number once."""
    pages = -(-context // page_size)
    return np.random.default_rng(seed).permutation(slots * pages).astype(np.int32).reshape(slots, pages)


def batch(runs: list[Run], table: np.ndarray, last_only: bool = False) -> Batch:
    """The rows of some runs; logits of all rows, or of each run's last."""
    counts = [len(tokens) for _, _, tokens in runs]
    total = sum(counts)
    rows = np.cumsum(counts) - 1 if last_only else np.arange(total)
    return Batch(
        tokens=np.array([token for _, _, tokens in runs for token in tokens], np.int64),
        positions=np.array([start + i for _, start, tokens in runs for i in range(len(tokens))], np.int64),
        slots=np.repeat([slot for slot, _, _ in runs], counts).astype(np.int64),
        page_table=table,
        logit_rows=rows.astype(np.int64),
        output_index=np.zeros(len(rows), np.int64),
    )


def runs_of(runs: list[Run]) -> Runs:
    """What the host knows of them."""
    counts = np.array([len(tokens) for _, _, tokens in runs], np.int64)
    return Runs(
        firsts=np.cumsum(counts) - counts,
        counts=counts,
        starts=np.array([start for _, start, _ in runs], np.int64),
        slots=np.array([slot for slot, _, _ in runs], np.int64),
    )


@dataclass
class Inactive:
    """Rows to add to a step that must change nothing."""

    before: int = 0
    after: int = 0


def device_rows(
    runs: list[Run], table: np.ndarray, device: str, *, last_only: bool = False, inactive: Inactive | None = None
) -> Rows:
    """The same on a device; inactive rows hold nonsense besides their position, and a pair of them makes a run."""
    extra = inactive or Inactive()
    plain, counts = batch(runs, table, last_only), [len(tokens) for _, _, tokens in runs]
    firsts = np.repeat(np.cumsum(counts) - counts, counts) + extra.before

    def spread(values: np.ndarray, nonsense: int) -> np.ndarray:
        return np.concatenate(([nonsense] * extra.before, values, [nonsense] * extra.after)).astype(np.int32)

    leaders = spread(firsts, 0)
    idle = [*range(extra.before), *range(len(leaders) - extra.after, len(leaders))]
    leaders[idle] = [row - row % 2 * (row - 1 in idle) for row in idle]

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Rows(
        tokens=put(spread(plain.tokens, -5)),
        positions=put(spread(plain.positions, -1)),
        slots=put(spread(plain.slots, 0)),
        leaders=put(leaders),
        counts=put(np.bincount(leaders, minlength=len(leaders)).astype(np.int32)),
        page_table=put(table),
        logit_rows=put((plain.logit_rows + extra.before).astype(np.int32)),
    )
