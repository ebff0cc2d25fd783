"""Two lookup models that agree at most prefixes, as a small and a large model of one family do."""

from __future__ import annotations

import torch

from tests.worker.lookup import ROWS, LookupModel


def cousin(model: LookupModel, seed: int, same: float) -> LookupModel:
    """A model with a share of the other one's rows, and rows that are near it elsewhere, or far away."""
    other = LookupModel(seed, model.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(ROWS, 1, generator=generator)
    near = model.table + torch.randn(ROWS, model.vocab_size, generator=generator)
    rest = torch.where(draw < (1 + same) / 2, near, other.table)
    other.table = torch.where(draw < same, model.table, rest)
    return other
