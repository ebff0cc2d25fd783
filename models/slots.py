"""What a device knows of its slots: one flat int32 tensor of slot records and page table, changed by (index, value) pairs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from models.batch import PageTable
from models.resident import SlotSetup

Int32Array = npt.NDArray[np.int32]

MAX_PARAMS = 8
"""Numeric parameters of one route."""
MAX_STOP_IDS = 24

_LARGEST = (1 << 31) - 1
_U64 = (1 << 64) - 1


class Field(IntEnum):
    """Words of a slot's record. The device writes the first three and ROUTABLE, the host all from ROUTABLE on."""

    TOKEN = 0
    """The next token to feed."""
    POSITION = 1
    """Where it is fed."""
    ACTIVE = 2
    ROUTABLE = 3
    PROMPT_LENGTH = 4
    MAX_TOKENS = 5
    MIN_TOKENS = 6
    STOP_COUNT = 7
    TEMPERATURE = 8
    """float32, as TOP_P, MIN_P and the parameters."""
    TOP_K = 9
    TOP_P = 10
    MIN_P = 11
    SEED_LOW = 12
    SEED_HIGH = 13
    CHOICE = 14
    ROUTE = 15
    PARAMS = 16
    STOP_IDS = PARAMS + MAX_PARAMS


RECORD_WORDS = Field.STOP_IDS + MAX_STOP_IDS

_SETUP = struct.Struct(f"<5if i2f Qii {MAX_PARAMS}f {MAX_STOP_IDS}i".replace(" ", ""))
"""Words ROUTABLE ... of a record, without padding."""
_SETUP_WORDS = struct.Struct(f"<{RECORD_WORDS - Field.ROUTABLE}i")


class SlotTable:
    """Slot records and page table on a device, and the host's changes that have not gone there yet.

    Args:
        max_slots: slots; a record each.
        max_pages: entries of a page table row.
        device: where `cells` lies.
    """

    def __init__(self, max_slots: int, max_pages: int, device: torch.device) -> None:
        self.max_slots = max_slots
        self.max_pages = max_pages
        self._first_page = max_slots * RECORD_WORDS
        self.cells = torch.zeros(self._first_page + max_slots * max_pages, dtype=torch.int32, device=device)
        """[max_slots * RECORD_WORDS + max_slots * max_pages] int32."""
        self.records = self.cells[: self._first_page].view(max_slots, RECORD_WORDS)
        self.page_table = self.cells[self._first_page :].view(max_slots, max_pages)
        self.pages = np.zeros((max_slots, max_pages), np.int32)
        """The host's copy of the page table, pending changes included."""
        self._pending: dict[int, int] = {}

    def setup(self, setup: SlotSetup) -> None:
        """Change what the host says of a slot. Raises ValueError for what a record cannot hold."""
        self._check(setup)
        stops, params = setup.stop_ids, setup.params
        words = _SETUP.pack(
            setup.routable,
            setup.prompt_length,
            min(setup.max_tokens, _LARGEST),
            min(setup.min_tokens, _LARGEST),
            len(stops),
            setup.temperature,
            setup.top_k,
            setup.top_p,
            setup.min_p,
            setup.seed & _U64,
            setup.choice,
            setup.route,
            *params,
            *(0.0,) * (MAX_PARAMS - len(params)),
            *stops,
            *(0,) * (MAX_STOP_IDS - len(stops)),
        )
        first = setup.slot * RECORD_WORDS + Field.ROUTABLE
        count = RECORD_WORDS - Field.ROUTABLE - MAX_STOP_IDS + len(stops)
        self._pending.update(zip(range(first, first + count), _SETUP_WORDS.unpack(words), strict=False))

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Change entries `first` ... of a page table row. Raises ValueError when they do not fit."""
        if not 0 <= slot < self.max_slots or first < 0 or first + len(pages) > self.max_pages:
            raise ValueError(
                f"slot {slot}: pages {first} to {first + len(pages)} are outside a table of"
                f" {self.max_slots} slots with {self.max_pages} pages each"
            )
        self.pages[slot, first : first + len(pages)] = pages
        start = self._first_page + slot * self.max_pages + first
        self._pending.update(zip(range(start, start + len(pages)), pages, strict=True))

    def match_pages(self, slots: npt.NDArray[np.int64], table: PageTable, columns: int) -> None:
        """Make the first `columns` entries of the slots' rows what they are in `table` [max_slots, max_pages]."""
        rows = np.unique(slots)
        differing, column = np.nonzero(self.pages[rows, :columns] != table[rows, :columns])
        for slot, place in zip(rows[differing].tolist(), column.tolist(), strict=True):
            self.set_pages(slot, place, [int(table[slot, place])])

    @property
    def pending(self) -> int:
        """Changes that wait."""
        return len(self._pending)

    def take(self) -> Int32Array:
        """[2, n] indices into `cells` and their new values, no index twice; nothing is pending afterwards."""
        count = len(self._pending)
        pairs = np.empty((2, count), np.int32)
        pairs[0] = np.fromiter(self._pending, np.int32, count)
        # Values are two's complement words; the bits of a float may look negative.
        pairs[1] = np.fromiter(self._pending.values(), np.int32, count)
        self._pending.clear()
        return pairs

    def _check(self, setup: SlotSetup) -> None:
        if not 0 <= setup.slot < self.max_slots:
            raise ValueError(f"slot: {setup.slot} is not below {self.max_slots}")
        if len(setup.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: {len(setup.stop_ids)} given, a slot holds {MAX_STOP_IDS}")
        if len(setup.params) > MAX_PARAMS:
            raise ValueError(f"params: {len(setup.params)} given, a slot holds {MAX_PARAMS}")
