"""What the host tells a step, in pinned memory that the step's first kernel reads: one entry per turn, in a ring."""

from __future__ import annotations

import numpy as np
import torch

from models.eager_steps import counts, leaders
from models.resident import StepRows
from models.rows import Runs
from models.slots import Int32Array

HEADER_WORDS = 16
"""Rows, wanted logit rows, how many of those are decided, changes, epoch; the rest is unused."""
_EPOCH = 4
"""Turn + 1 modulo 2**32, as int32: written last, so that a device that sees it may read the entry before its step is launched."""
_HALF = 1 << 31
MAX_CHANGES = 1024
"""Changes of slot records and page table that an entry holds."""


class Inbox:
    """A ring of entries: header | slots | tokens | positions | leaders | counts | logit rows (`span` words each) | changes.

    Args:
        entries: turns that may be under way.
        span: most rows of an entry.
        pinned: False where there is no device to read it.
    """

    def __init__(self, entries: int, span: int, *, pinned: bool = True) -> None:
        self.entries = entries
        self.span = span
        self.entry_words = HEADER_WORDS + 6 * span + 2 * MAX_CHANGES
        self.memory = torch.zeros(entries, self.entry_words, dtype=torch.int32, pin_memory=pinned)
        self._words: Int32Array = self.memory.numpy()
        self._every = np.arange(span, dtype=np.int32)

    def write(self, turn: int, rows: StepRows, runs: Runs, changes: Int32Array, decided: int) -> None:
        """Fill the entry of a turn; the one `entries` turns before must be over."""
        words = self._words[turn % self.entries]
        span, count = self.span, len(rows)
        table = words[HEADER_WORDS : HEADER_WORDS + 6 * span].reshape(6, span)
        table[0, :count] = rows.slots
        table[1, :count] = rows.tokens
        table[2, :count] = rows.positions
        if len(runs.firsts) == count:
            table[3, :count] = self._every[:count]
            table[4, :count] = 1
        elif len(runs.firsts) == 1:
            # A visit alone, which somebody waits for: a quarter of the time of what follows.
            table[3:5, :count] = 0
            table[4, 0] = count
        else:
            table[3, :count] = leaders(runs)
            table[4, :count] = counts(runs)
        table[5, : len(rows.logit_rows)] = rows.logit_rows
        words[:4] = (count, len(rows.logit_rows), decided, changes.shape[1])
        if changes.shape[1]:
            first = HEADER_WORDS + 6 * span
            words[first : first + changes.size] = changes.ravel()
        words[_EPOCH] = (turn + 1 + _HALF) % (2 * _HALF) - _HALF


def entry_of(rows: StepRows, runs: Runs, changes: Int32Array, decided: int) -> Int32Array:
    """An entry of its own for a step of any size: its span is its number of rows."""
    header = np.zeros(HEADER_WORDS, np.int32)
    header[:4] = (len(rows), len(rows.logit_rows), decided, changes.shape[1])
    logit_rows = np.zeros(len(rows), np.int64)
    logit_rows[: len(rows.logit_rows)] = rows.logit_rows
    parts = (header, rows.slots, rows.tokens, rows.positions, leaders(runs), counts(runs), logit_rows, changes.ravel())
    return np.concatenate(parts).astype(np.int32)
