"""One pass over the logits, by row and chunk of the vocabulary: everything that can be reduced without knowing the row's rest."""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.noise import draw_key, rough_noise
from models.cuda.kernels.slot_words import (
    CHOICE,
    MIN_TOKENS,
    PROMPT_LENGTH,
    SEED_HIGH,
    SEED_LOW,
    STOP_COUNT,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORDS,
)

# Quantities per row and chunk, float32.
BEST = tl.constexpr(0)
"""Largest logit that is not banned."""
FIRST = tl.constexpr(1)
"""Largest perturbed score, counted from BEST of the chunk, and the one after it."""
SECOND = tl.constexpr(2)
MASS = tl.constexpr(3)
"""Sum of exp((x - BEST) / temperature), about."""
TOP = tl.constexpr(4)
"""Raw logits: the largest, and sums of e = exp(x - TOP) and e * (x - TOP)."""
TOTAL = tl.constexpr(5)
MOMENT = tl.constexpr(6)
LEAST = tl.constexpr(7)
"""Smallest logit that is not banned and above -inf; inf where there is none."""
QUANTITIES = tl.constexpr(8)
# Ids per row and chunk, int32.
BEST_ID = tl.constexpr(0)
FIRST_ID = tl.constexpr(1)
SECOND_ID = tl.constexpr(2)
IDS = tl.constexpr(3)

GROUPS = tl.constexpr(32)
"""Parts of a chunk whose largest logits are kept one by one."""

NEVER = tl.constexpr(float("-inf"))


@triton.jit
def row_of(row, logit_rows, positions, slots, cells, decided):
    """Whether the logit row is decided here, its slot's record and the output index of its token."""
    token_row = tl.load(logit_rows + row)
    position = tl.load(positions + token_row)
    alive = (row < tl.load(decided)) & (position >= 0)
    record = cells + tl.load(slots + token_row).to(tl.int64) * WORDS
    return alive, record, position + 1 - tl.load(record + PROMPT_LENGTH)


@triton.jit
def real(record, field: tl.constexpr):
    """A float32 word of a record."""
    return tl.load(record + field).to(tl.float32, bitcast=True)


@triton.jit
def unbanned(x, ids, record, index):
    """Logits with the stop ids at -inf while the output index is below min_tokens."""
    if index < tl.load(record + MIN_TOKENS):
        for place in range(tl.load(record + STOP_COUNT)):
            x = tl.where(ids == tl.load(record + STOP_IDS + place), NEVER, x)
    return x


@triton.jit
def row_key(record, index):
    """The key of the row's draw."""
    return draw_key(tl.load(record + SEED_LOW), tl.load(record + SEED_HIGH), tl.load(record + CHOICE), index)


@triton.jit
def tempered(x, best, temperature):
    """(x - best) / temperature as the reference rounds it; -inf stays, and -0 counts as 0."""
    y = tl.where(x == NEVER, NEVER, tl.div_rn(x - best, temperature))
    return tl.where(y == 0.0, 0.0, y)


@triton.jit(
    do_not_specialize=["rows_held"],
    do_not_specialize_on_alignment=["positions", "slots", "logit_rows"],
)
def scan(
    logits: tl.tensor,
    cells: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    logit_rows: tl.tensor,
    decided: tl.tensor,
    quantities: tl.tensor,
    found: tl.tensor,
    groups: tl.tensor,
    rows_held,
    row_stride,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (chunks, R). `quantities` is [QUANTITIES, rows_held, CHUNKS] float32, `found` [IDS, rows_held, CHUNKS] int32, `groups`
    [rows_held, CHUNKS * GROUPS] float32: BEST of each part of a chunk, written for rows with a top_k above CHUNKS."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    alive, record, index = row_of(row, logit_rows, positions, slots, cells, decided)
    if not alive:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < vocab, other=NEVER)
    plane = rows_held * CHUNKS
    place = row * CHUNKS + chunk
    real_place = quantities + place
    id_place = found + place

    top = tl.max(raw, axis=0)
    shifted = raw - tl.where(top == NEVER, 0.0, top)
    weights = tl.exp(shifted)
    tl.store(real_place + plane * TOP, top)
    tl.store(real_place + plane * TOTAL, tl.sum(weights, axis=0))
    tl.store(real_place + plane * MOMENT, tl.sum(tl.where(weights > 0, weights * shifted, 0.0), axis=0))

    x = unbanned(raw, ids, record, index)
    best, best_place = tl.max(x, axis=0, return_indices=True)
    tl.store(real_place + plane * BEST, best)
    tl.store(id_place + plane * BEST_ID, chunk * CHUNK + best_place)
    temperature = real(record, TEMPERATURE)
    if temperature > 0:
        y = tempered(x, tl.where(best == NEVER, 0.0, best), temperature)
        score = y - rough_noise(row_key(record, index), ids)
        score = tl.where(ids < vocab, score, NEVER)
        first, first_place = tl.max(score, axis=0, return_indices=True)
        second, second_place = tl.max(
            tl.where(ids == chunk * CHUNK + first_place, NEVER, score), axis=0, return_indices=True
        )
        tl.store(real_place + plane * FIRST, first)
        tl.store(real_place + plane * SECOND, second)
        tl.store(id_place + plane * FIRST_ID, chunk * CHUNK + first_place)
        tl.store(id_place + plane * SECOND_ID, chunk * CHUNK + second_place)
        if real(record, TOP_P) < 1:
            tl.store(real_place + plane * MASS, tl.sum(tl.exp(y), axis=0))
            tl.store(real_place + plane * LEAST, tl.min(tl.where(x == NEVER, float("inf"), x), axis=0))
        if tl.load(record + TOP_K) > CHUNKS:
            bests = tl.max(tl.reshape(x, (GROUPS, CHUNK // GROUPS)), axis=1)
            tl.store(groups + place * GROUPS + tl.arange(0, GROUPS), bests)
