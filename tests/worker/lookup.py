"""A model whose law is a table and whose KV is the fed ids themselves: exact, instant, and unforgiving.

Every answer is looked up by a hash of all ids in front of it, read back through the page table, so that a wrong page, a wrong
position, a token fed twice or never, or KV that should have been truncated changes the output or raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from models.batch import Batch, StepOutput

ROWS = 4093
HIDDEN = 4
_EMPTY = -1


class LookupModel:
    """[V] logits and [H] hidden states, unrelated, as pure functions of the ids; peaked and flat rows of logits, so that entropies
    cover their whole range."""

    def __init__(self, seed: int, vocab_size: int = 48) -> None:
        generator = torch.Generator().manual_seed(seed)
        scale = torch.rand(ROWS, 1, generator=generator) * 8
        self.vocab_size = vocab_size
        self.table = torch.randn(ROWS, vocab_size, generator=generator) * scale
        self.table.requires_grad_(False)
        self.hidden = torch.randn(ROWS, HIDDEN, generator=generator)

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """[V] logits of the token after `ids`."""
        return self.table[self.row(ids)]

    def row(self, ids: Sequence[int]) -> int:
        """Row of the table for a prefix."""
        value = 1
        for token in ids:
            value = (value * 1_000_003 + token + 1) % 2_147_483_647
        return value % ROWS


class LookupRunner:
    """ModelRunner over a LookupModel."""

    inline = True
    hidden_size = HIDDEN
    embedding = None

    def __init__(
        self, model: LookupModel, *, num_pages: int = 512, page_size: int = 4, context_length: int = 512
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.num_pages, self.page_size, self.context_length = num_pages, page_size, context_length
        self.stored = np.full(num_pages * page_size, _EMPTY, np.int64)
        """Id per KV position of the pool."""

    def step(self, batch: Batch) -> StepOutput:
        """Store the fed ids, then look the wanted rows up by what the page table says lies in front of them."""
        places = self._places(batch, batch.slots, batch.positions)
        assert len(set(places.tolist())) == len(places), "two rows write one KV position"
        self.stored[places] = batch.tokens
        rows = [
            self.model.row(self._prefix(batch, int(batch.slots[row]), int(batch.positions[row])))
            for row in batch.logit_rows
        ]
        return StepOutput(self.model.table[rows], self.model.hidden[rows])

    def _places(self, batch: Batch, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        pages = batch.page_table[slots, positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size

    def _prefix(self, batch: Batch, slot: int, last: int) -> list[int]:
        positions = np.arange(last + 1)
        ids = self.stored[self._places(batch, np.full(last + 1, slot), positions)].tolist()
        assert _EMPTY not in ids, f"slot {slot} reads KV that was never written, of positions 0 to {last}"
        return ids
