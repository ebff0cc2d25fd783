"""First kernel of a step: what the host has written for this turn becomes slot records and token rows.

The host's memory is microseconds away, and again for what depends on the first answer. Where steps are queued ahead, the
entry of the next turn is there long before it is needed: `fetch` copies it to the device beside the sampler of the step before,
in a branch of the graph. Why that is the entry and nothing else:

- The host stores an entry's words before its epoch, and stores become visible in program order (on x86-64; elsewhere
  `StepKernels` does not fetch). Each thread of `fetch` goes on only after it has itself loaded the epoch, with a fence between
  that load and those of the words: whoever sees the epoch sees the words. No place of the ring has held that epoch before,
  as turns are counted modulo 2**32.
- An entry is rewritten only when its turn is over, and its turn began after this branch had joined. A launch that fails may be
  repeated in the same turn with other words: the host then has what was fetched forgotten, in stream order.
- `ingest` compares the copy's epoch with its own turn, on the device alone: `fetch` ended with the graph before. If they
  differ, since the host was late or this turn has no entry in the ring, it reads where the host wrote, before the launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.slot_words import (
    ACTIVE,
    CHANGES,
    DECIDED,
    EPOCH,
    HEADER,
    NEXT,
    OWN,
    POSITION,
    ROWS,
    STARTED,
    TOKEN,
    TURN,
    WANTED,
    WORDS,
)
from models.cuda.kernels.timer import fence, now


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


@triton.jit(
    do_not_specialize=["entries", "entry_words", "span", "total", "total_wanted"],
    do_not_specialize_on_alignment=["tokens", "positions", "slots", "leaders", "counts", "logit_rows"],
)
def ingest(
    inbox: tl.tensor,
    fetched: tl.tensor,
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
    """One program. `total` rows and `total_wanted` logit rows are stored, of which the entry gives the first ones.

    `entry_words` is 0 where `inbox` is the entry itself.
    """
    started = now(ON_DEVICE)
    turn = tl.load(clock + TURN)
    entry = inbox + (turn % entries) * entry_words
    if (entry_words > 0) & (tl.load(fetched + EPOCH) == (turn + 1).to(tl.int32)):
        entry = fetched
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
    tl.store(clock + NEXT, turn + 1)


@triton.jit
def _copy_rows(entry, fetched, span, first, count, place):
    """The words of the rows, and logit rows, `first` ... that `place` says, of `count`."""
    kind = tl.arange(0, 8)[:, None]
    row = first + place[None, :]
    where = HEADER + kind * span + row
    inside = (kind < 6) & (row < count)
    tl.store(fetched + where, tl.load(entry + where, mask=inside, other=0, volatile=True), mask=inside)


@triton.jit(do_not_specialize=["entries", "entry_words", "span", "likely"])
def fetch(
    inbox: tl.tensor,
    fetched: tl.tensor,
    clock: tl.tensor,
    entries,
    entry_words,
    span,
    likely,
    BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """One program, after `ingest` of a turn: copy the next turn's entry if it is complete, in two trips if it has `likely` rows.

    Of the clock it reads what the rest of the step does not write.
    """
    turn = tl.load(clock + NEXT)
    entry = inbox + (turn % entries) * entry_words
    place = tl.arange(0, BLOCK)
    # The host may be about to write it, and threads may differ in what they see: all have to agree.
    epoch = tl.load(entry + EPOCH + place * 0, volatile=True)
    if tl.min((epoch == (turn + 1).to(tl.int32)).to(tl.int32), axis=0) == 1:
        fence(ON_DEVICE)
        first = tl.minimum(likely, BLOCK)
        pairs = HEADER + 6 * span
        header = tl.load(entry + place, mask=place < HEADER, other=0, volatile=True)
        words = tl.load(entry + pairs + place, mask=pairs + place < entry_words, other=0, volatile=True)
        _copy_rows(entry, fetched, span, 0, first, place)
        tl.store(fetched + place, header, mask=place < HEADER)
        tl.store(fetched + pairs + place, words, mask=pairs + place < entry_words)
        rows = tl.max(tl.where((place == ROWS) | (place == WANTED), header, 0), axis=0)
        for start in range(first, rows, BLOCK):
            _copy_rows(entry, fetched, span, start, rows, place)
        changes = tl.sum(tl.where(place == CHANGES, header, 0), axis=0)
        for start in range(pairs + BLOCK, pairs + 2 * changes, BLOCK):
            inside = start + place < pairs + 2 * changes
            tl.store(fetched + start + place, tl.load(entry + start + place, mask=inside, volatile=True), mask=inside)
