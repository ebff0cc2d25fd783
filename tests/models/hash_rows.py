"""A row decoder without rounding: logits are a hash of the fed ids that its pages hold, the same bits on every device.

Its KV cache stores ids. What a row sees depends on positions, slots, page table and write order as attention does, so that a
misplaced row changes everything after it; logits have few distinct values, so that ties are common.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from models.batch import StepOutput
from models.rng import item_bits_tensor
from models.rows import Rows, Runs

VOCAB = 97
HIDDEN = 4
PAGE = 4


class HashRows:
    """RowDecoder."""

    def __init__(
        self, *, num_pages: int, max_pages: int, vocab: int = VOCAB, device: str = "cpu", levels: int = 64
    ) -> None:
        self.config: Any = SimpleNamespace(hidden_size=HIDDEN)
        self.embedding = torch.zeros(VOCAB, HIDDEN)
        self.device = torch.device(device)
        self.dtype = torch.float32
        self.vocab_size = vocab
        self.context_length = max_pages * PAGE
        self.page_size = PAGE
        self.num_pages = num_pages
        self._levels = levels
        # The last page takes what inactive rows write.
        self._pool = torch.full((num_pages + 1, PAGE), -7, dtype=torch.int64, device=self.device)
        self._place = torch.arange(self.context_length, device=self.device)
        self._items = torch.arange(vocab, device=self.device)

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        positions, slots = rows.positions.long(), rows.slots.long()
        active = positions >= 0
        place = positions.clamp(min=0)
        pages = torch.where(active, rows.page_table[slots, place // PAGE].long(), self.num_pages)
        self._pool[pages, place % PAGE] = rows.tokens.long()
        wanted = rows.logit_rows.long()
        seen = self._pool[rows.page_table[slots[wanted]].long()].flatten(1)
        hidden = positions[wanted][:, None]
        state = torch.where(self._place <= hidden, item_bits_tensor(seen, self._place), 0).sum(dim=1)
        return self.output(state)

    def output(self, state: torch.Tensor) -> StepOutput:
        """Logits [R, V] and hidden [R, H] of hashes [R]."""
        bits = item_bits_tensor(state[:, None], self._items)
        logits = ((bits >> 20) % self._levels).float() / 8
        return StepOutput(logits, ((state[:, None] >> torch.arange(HIDDEN, device=self.device)) & 255).float())

    def output_of(self, ids: list[int]) -> StepOutput:
        """What the last of these ids gives, computed from the ids alone."""
        tokens = torch.tensor(ids, device=self.device)
        return self.output(item_bits_tensor(tokens, self._place[: len(ids)]).sum(dim=0, keepdim=True))
