"""Entries of steps in the inbox against entries of their own, which have the same lines at another width."""

from __future__ import annotations

import numpy as np
import pytest

from models.cuda.inbox import HEADER_WORDS, Inbox, entry_of
from models.device_runner import DeviceRunner
from models.resident import StepRows
from tests.models.hash_rows import HashRows

SPAN = 64
NO_CHANGES = np.zeros((2, 0), np.int32)


@pytest.mark.parametrize(
    "counts", [(1,), (3,), (40,), (1, 1, 1), (3, 1), (1, 4, 2), (1,) * 40, (5,) * 8], ids=lambda counts: f"{counts}"
)
def test_an_entry_has_the_lines_of_its_rows_and_runs(counts: tuple[int, ...]) -> None:
    slots = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([np.arange(count) + 7 for count in counts])
    rows = StepRows(slots, np.arange(len(slots)) + 100, positions, np.cumsum(counts) - 1)
    decoder = HashRows(num_pages=64, max_pages=16)
    runs = DeviceRunner(decoder, max_slots=SPAN, max_pages=16)._runs_of(rows)
    inbox = Inbox(2, SPAN, pinned=False)
    inbox.memory.fill_(-5)
    inbox.write(1, rows, runs, NO_CHANGES, len(counts))
    lines = inbox.memory.numpy()[1, HEADER_WORDS : HEADER_WORDS + 6 * SPAN].reshape(6, SPAN)
    expected = entry_of(rows, runs, NO_CHANGES, len(counts))[HEADER_WORDS:].reshape(6, len(rows))
    assert lines[:5, : len(rows)].tolist() == expected[:5].tolist()
    assert lines[5, : len(counts)].tolist() == expected[5, : len(counts)].tolist()
    assert (lines[:5, len(rows) :] == -5).all()
