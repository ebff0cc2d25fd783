"""Records of steps in pinned memory, as the last kernel of each step writes them."""

from __future__ import annotations

import numpy as np
import torch

from models.resident import StepRecord

_HEADER_WORDS = 16
"""As 64-bit words: turns done (written last), start and end in ns."""


class RecordRing:
    """A ring of records: header | tokens | destinations | flags (`rows` words each); flag 1 = alive, 2 = stays."""

    def __init__(self, entries: int, rows: int, *, pinned: bool = True) -> None:
        self.entries = entries
        self.rows = rows
        self.entry_words = _HEADER_WORDS + 3 * rows + rows % 2
        self.memory = torch.zeros(entries, self.entry_words, dtype=torch.int32, pin_memory=pinned)
        words = self.memory.numpy()
        self._lines = words[:, _HEADER_WORDS : _HEADER_WORDS + 3 * rows].reshape(entries, 3, rows)
        self._headers = words.view(np.int64)[:, :3]

    def read(self, turn: int, number: int, count: int) -> StepRecord | None:
        """The record of a turn as step `number` of `count` rows, or None while it is not there."""
        place = turn % self.entries
        header = self._headers[place]
        if header[0] != turn + 1:
            return None
        tokens, destinations, flags = self._lines[place, :, :count].copy()
        begin, end = header[1:].tolist()
        return StepRecord(number, (flags & 1) != 0, tokens, destinations, flags >= 2, (end - begin) * 1e-9)
