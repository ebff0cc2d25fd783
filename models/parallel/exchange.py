"""A step's rows from the first rank to the others, as one tensor that goes from device to device.

The first rank alone keeps slots: which of them are still active, and what they feed, it knows on its device only when the step
runs. So rows travel inside the step, not with the order to run it. A few pages of a page table are cheaper to send along than
to keep equal everywhere: 82 KB at 8 rows and 2,560 pages, 2 or 3 us on NVLink beside the 10 that any broadcast takes.
"""

from __future__ import annotations

import numpy as np
import torch

from models.parallel.link import Layout
from models.rows import Rows, Runs


def layout_of(rows: Rows) -> Layout:
    """The shapes."""
    slots, pages = rows.page_table.shape
    return Layout(rows=len(rows), logit_rows=len(rows.logit_rows), slots=slots, pages=pages)


def packed_size(layout: Layout) -> int:
    """Elements of the packed rows."""
    return 5 * layout.rows + layout.logit_rows + min(layout.rows, layout.slots) * layout.pages


def pack_rows(rows: Rows) -> torch.Tensor:
    """[packed_size] int32.

    Where the page table has more rows than the step, it goes as one line per token row, and the slots change their meaning.
    """
    layout = layout_of(rows)
    if _by_row(layout):
        # A run's lines are all the same: its first row may stand for the others.
        slots, table = rows.leaders, rows.page_table.index_select(0, rows.slots)
    else:
        slots, table = rows.slots, rows.page_table
    parts = (rows.tokens, rows.positions, slots, rows.leaders, rows.counts, rows.logit_rows, table.flatten())
    return torch.cat(parts)


def unpack_rows(packed: torch.Tensor, layout: Layout) -> Rows:
    """Views of packed rows."""
    count = layout.rows
    columns = packed[: 5 * count].view(5, count)
    tables = packed[5 * count + layout.logit_rows :]
    return Rows(
        tokens=columns[0],
        positions=columns[1],
        slots=columns[2],
        leaders=columns[3],
        counts=columns[4],
        logit_rows=packed[5 * count : 5 * count + layout.logit_rows],
        page_table=tables.view(-1, layout.pages),
    )


def pack_runs(runs: Runs | None, layout: Layout) -> bytes | None:
    """The runs for ranks that get the rows packed."""
    if runs is None:
        return None
    slots = runs.firsts if _by_row(layout) else runs.slots
    return np.stack([runs.firsts, runs.counts, runs.starts, slots]).astype(np.int64).tobytes()


def unpack_runs(packed: bytes | None) -> Runs | None:
    """What `pack_runs` packed."""
    if packed is None:
        return None
    firsts, counts, starts, slots = np.frombuffer(packed, np.int64).reshape(4, -1).copy()
    return Runs(firsts=firsts, counts=counts, starts=starts, slots=slots)


def _by_row(layout: Layout) -> bool:
    return layout.rows < layout.slots
