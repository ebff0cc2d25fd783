"""First kernel of a step: what the host has written for this turn becomes slot records and token rows."""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.slot_words import (
    ACTIVE,
    CHANGES,
    DECIDED,
    HEADER,
    OWN,
    POSITION,
    ROWS,
    STARTED,
    TOKEN,
    TURN,
    WANTED,
    WORDS,
)
from models.cuda.kernels.timer import now


@triton.jit
def _asked(entry, span, place, given):
    """Slots, tokens, positions, leaders and counts that the host wrote for the rows `place`."""
    rows = entry + HEADER + place
    there = place < given
    slot = tl.load(rows, mask=there, other=0, volatile=True)
    token = tl.load(rows + span, mask=there, other=0, volatile=True)
    position = tl.load(rows + 2 * span, mask=there, other=0, volatile=True)
    leader = tl.load(rows + 3 * span, mask=there, other=0, volatile=True)
    count = tl.load(rows + 4 * span, mask=there, other=0, volatile=True)
    return slot, token, position, leader, count


@triton.jit
def _place(
    place,
    given,
    total,
    cells,
    slot,
    token,
    position,
    leader,
    count,
    tokens,
    positions,
    slots,
    leaders,
    counts,
):
    """Store the rows `place`: own tokens filled in, rows past `given` and those of slots that have left inactive."""
    there = place < given
    inside = place < total
    own = there & (token == OWN)
    slot = tl.where(there, slot, 0)
    record = cells + slot.to(tl.int64) * WORDS
    active = tl.load(record + ACTIVE, mask=own, other=1)
    token = tl.where(own, tl.load(record + TOKEN, mask=own, other=0), token)
    position = tl.where(own, tl.load(record + POSITION, mask=own, other=0), position)
    alive = there & (active != 0)
    tl.store(tokens + place, tl.where(alive, token, 0), mask=inside)
    tl.store(positions + place, tl.where(alive, position, -1), mask=inside)
    tl.store(slots + place, slot, mask=inside)
    tl.store(leaders + place, tl.where(there, leader, place), mask=inside)
    tl.store(counts + place, tl.where(there, count, 1), mask=inside)


@triton.jit(do_not_specialize=["entries", "entry_words", "span", "total", "total_wanted"])
def ingest(
    inbox: tl.tensor,
    clock: tl.tensor,
    cells: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    leaders: tl.tensor,
    counts: tl.tensor,
    logit_rows: tl.tensor,
    decided: tl.tensor,
    entries,
    entry_words,
    span,
    total,
    total_wanted,
    BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """One program. `total` rows and `total_wanted` logit rows are stored, of which the entry gives the first ones."""
    started = now(ON_DEVICE)
    turn = tl.load(clock + TURN)
    entry = inbox + (turn % entries) * entry_words
    place = tl.arange(0, BLOCK)
    # All that a small step needs is asked for at once: each trip to the host's memory takes about a microsecond.
    given = tl.load(entry + ROWS, volatile=True)
    wanted = tl.load(entry + WANTED, volatile=True)
    decisions = tl.load(entry + DECIDED, volatile=True)
    changes = tl.load(entry + CHANGES, volatile=True)
    slot, token, position, leader, count = _asked(entry, span, place, total)
    logit_row = tl.load(entry + HEADER + 5 * span + place, mask=place < total_wanted, other=0, volatile=True)

    pairs = entry + HEADER + 6 * span
    for start in range(0, changes, BLOCK):
        change = start + place
        index = tl.load(pairs + change, mask=change < changes, other=0, volatile=True)
        value = tl.load(pairs + changes + change, mask=change < changes, other=0, volatile=True)
        tl.store(cells + index, value, mask=change < changes)
    tl.debug_barrier()

    _place(place, given, total, cells, slot, token, position, leader, count, tokens, positions, slots, leaders, counts)
    tl.store(logit_rows + place, tl.where(place < wanted, logit_row, total - 1), mask=place < total_wanted)
    for start in range(BLOCK, total, BLOCK):
        far = start + place
        slot, token, position, leader, count = _asked(entry, span, far, given)
        _place(
            far, given, total, cells, slot, token, position, leader, count, tokens, positions, slots, leaders, counts
        )
        logit_row = tl.load(entry + HEADER + 5 * span + far, mask=far < wanted, other=0, volatile=True)
        tl.store(logit_rows + far, tl.where(far < wanted, logit_row, total - 1), mask=far < total_wanted)
    tl.store(decided, decisions)
    tl.store(clock + STARTED, started)
