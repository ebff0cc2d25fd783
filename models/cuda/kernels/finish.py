"""Last part of a step: who stays, the advance of the slots, and the record for the host."""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.slot_words import (
    ACTIVE,
    MAX_TOKENS,
    POSITION,
    PROMPT_LENGTH,
    RECORD_HEADER,
    ROUTABLE,
    ROUTE,
    STARTED,
    STOP_COUNT,
    STOP_IDS,
    TOKEN,
    TURN,
    WORDS,
)
from models.cuda.kernels.timer import fence, now


@triton.jit
def finish_rows(
    tokens,
    answers,
    cells,
    positions,
    slots,
    logit_rows,
    decided,
    clock,
    records,
    entries,
    entry_words,
    rows_held,
    R,
    BLOCK: tl.constexpr,
    ROUTED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """All rows in one program. `answers` [routes, rows_held] int32: each route's destinations, of which a row takes its own."""
    turn = tl.load(clock + TURN)
    record = records + (turn % entries) * entry_words
    count = tl.load(decided)
    for start in range(0, R, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < count
        token_row = tl.load(logit_rows + row, mask=inside, other=0)
        position = tl.load(positions + token_row, mask=inside, other=-1)
        alive = inside & (position >= 0)
        state = cells + tl.load(slots + token_row, mask=inside, other=0).to(tl.int64) * WORDS
        # Other programs of this very kernel may have written it: never from this SM's own cache.
        token = tl.load(tokens + row, mask=alive, other=0, cache_modifier=".cg").to(tl.int32)
        destination = tl.zeros([BLOCK], tl.int32)
        routable = tl.load(state + ROUTABLE, mask=alive, other=0)
        if ROUTED:
            route = tl.load(state + ROUTE, mask=alive, other=-1)
            asked = alive & (route >= 0) & (routable != 0)
            destination = tl.load(answers + route * rows_held + row, mask=asked, other=0)
        index = position + 1 - tl.load(state + PROMPT_LENGTH, mask=alive, other=0)
        stops = tl.load(state + STOP_COUNT, mask=alive, other=0)
        stopped = tl.zeros([BLOCK], tl.int1)
        for place in range(tl.max(stops, axis=0)):
            stop = tl.load(state + STOP_IDS + place, mask=place < stops, other=-1)
            stopped = stopped | ((place < stops) & (stop == token))
        most = tl.load(state + MAX_TOKENS, mask=alive, other=0)
        stays = alive & (destination == 0) & (stopped == 0) & (index < most - 1)
        tl.store(state + TOKEN, token, mask=alive)
        tl.store(state + POSITION, position + 1, mask=alive)
        tl.store(state + ACTIVE, stays.to(tl.int32), mask=alive)
        tl.store(state + ROUTABLE, tl.where(stays, 1, routable), mask=alive)
        line = record + RECORD_HEADER + row
        tl.store(line, token, mask=inside)
        tl.store(line + rows_held, destination, mask=inside)
        tl.store(line + 2 * rows_held, alive.to(tl.int32) + 2 * stays.to(tl.int32), mask=inside)
    header = record.to(tl.pointer_type(tl.int64))
    tl.store(header + 1, tl.load(clock + STARTED))
    tl.store(header + 2, now(ON_DEVICE))
    # The record is there for the host before the number that says so.
    fence(ON_DEVICE)
    tl.store(header, turn + 1)
    tl.store(clock + TURN, turn + 1)


@triton.jit(
    do_not_specialize=["entries", "entry_words", "rows_held", "R"],
    do_not_specialize_on_alignment=["positions", "slots", "logit_rows"],
)
def finish(
    tokens: tl.tensor,
    answers: tl.tensor,
    cells: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    logit_rows: tl.tensor,
    decided: tl.tensor,
    clock: tl.tensor,
    records: tl.tensor,
    entries,
    entry_words,
    rows_held,
    R,
    BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """One program, after the routes have answered."""
    finish_rows(
        tokens,
        answers,
        cells,
        positions,
        slots,
        logit_rows,
        decided,
        clock,
        records,
        entries,
        entry_words,
        rows_held,
        R,
        BLOCK,
        True,
        ON_DEVICE,
    )
