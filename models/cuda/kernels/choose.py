"""From a scan to one token per row; in the form without routes also to the end of the step."""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.cut import ANY_ID, NO_GOAL, beats, best_of, cut_and_draw
from models.cuda.kernels.finish import finish_rows
from models.cuda.kernels.nucleus import SLACK, append, edge_of, gather_nucleus, heights
from models.cuda.kernels.scan import BEST, GROUPS, NEVER, real, row_key, row_of, tempered
from models.cuda.kernels.slot_words import (
    CHOICE,
    MIN_P,
    PARAM_COUNT,
    PARAMS,
    ROUTABLE,
    ROUTE,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from models.cuda.kernels.winner import likeliest_of, winner_of

_BISECTIONS = tl.constexpr(32)


@triton.jit
def _ordered(x):
    """Bits of floats as int64 that compare alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _kth_largest(values, count, k, SPAN: tl.constexpr):
    """The k-th largest of `count` maxima of parts of a row, below which nothing is among its k largest; -inf when k > count."""
    place = tl.arange(0, SPAN)
    value = _ordered(tl.load(values + place, mask=place < count, other=NEVER))
    low = tl.min(value, axis=0)
    high = tl.max(value, axis=0)
    for _ in range(_BISECTIONS):
        middle = high - (high - low) // 2
        enough = tl.sum((value >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, tl.maximum(middle - 1, low))
    found = low.to(tl.int32)
    found = (found ^ ((found >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(k <= count, found, NEVER)


@triton.jit
def _gather(
    whole,
    vocab,
    floor,
    bests,
    depths,
    ids,
    size,
    part,
    parts,
    LIST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """List this program's share of the candidates with y >= floor."""
    best, temperature = whole[3], whole[4]
    for chunk in range(part, CHUNKS, parts):
        if tempered(tl.load(bests + chunk), best, temperature) >= floor:
            y, name = heights(whole, chunk, vocab, CHUNK)
            append((y >= floor) & (name < vocab), y, name, depths, ids, size, LIST)


@triton.jit
def _tell_routes(row, alive, record, index, numbers, settings, row_route, rows_held, routes):
    """What routing functions see of the row: see `models.device_routes.RouteInputs`."""
    low = tl.load(record + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.int64)
    seed = (tl.load(record + SEED_HIGH).to(tl.int64) << 32) | low
    tl.store(numbers + rows_held + row, tl.where(alive, index, 0).to(tl.int64))
    tl.store(numbers + 2 * rows_held + row, tl.where(alive, seed, 0))
    tl.store(numbers + 3 * rows_held + row, tl.where(alive, tl.load(record + CHOICE), 0).to(tl.int64))
    routed = alive & (tl.load(record + ROUTABLE) != 0)
    route = tl.where(routed, tl.load(record + ROUTE), -1)
    tl.store(row_route + row, route)
    place = tl.arange(0, PARAM_COUNT)
    own = tl.load(record + PARAMS + place).to(tl.float32, bitcast=True)
    for number in range(routes):
        # 1 is inside the range of nearly any parameter, divisors included: `device_routes.FOREIGN`.
        tl.store(settings + (number * rows_held + row) * PARAM_COUNT + place, tl.where(route == number, own, 1.0))


@triton.jit
def _cut(
    row,
    part,
    parts,
    whole,
    likeliest,
    key,
    vocab,
    bests,
    groups,
    work,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """The draw of a row under its cuts, and whether this program is the one that has made it."""
    record, best, temperature = whole[1], whole[3], whole[4]
    depths, ids, sizes, tickets, scales, masses, scores, names = work
    wide_row = row.to(tl.int64)
    depths += wide_row * LIST
    ids += wide_row * LIST
    masses += wide_row * BUCKETS
    scores += row * CHUNKS
    names += row * CHUNKS
    size = sizes + row
    top_k = tl.load(record + TOP_K)
    top_p = real(record, TOP_P)
    least = _least(record)
    scale = tl.load(scales + row)
    goal = tl.full([], NO_GOAL, tl.int64)
    if scale > 0:
        edge, goal = edge_of(masses, top_p, BUCKETS)
        top, chosen = gather_nucleus(
            whole, vocab, least, key, edge, scale, bests, depths, ids, size, part, parts, LIST, CHUNK, CHUNKS, BUCKETS
        )
        tl.store(scores + part, top)
        tl.store(names + part, chosen)
    else:
        # What min_p drops still counts in the mass of the top_k likeliest, of which top_p keeps a share.
        floor = tl.where(top_p < 1, NEVER, least - SLACK)
        if top_k > CHUNKS:
            many = _kth_largest(groups + row * (CHUNKS * GROUPS), CHUNKS * GROUPS, top_k, SPAN * GROUPS)
            floor = tl.maximum(floor, tempered(many, best, temperature))
        elif top_k > 0:
            floor = tl.maximum(floor, tempered(_kth_largest(bests, CHUNKS, top_k, SPAN), best, temperature))
        _gather(whole, vocab, floor, bests, depths, ids, size, part, parts, LIST, CHUNK, CHUNKS)
    tl.debug_barrier()
    token = likeliest
    decides = tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == parts - 1
    if decides:
        tl.debug_barrier()
        number = tl.load(size, cache_modifier=".cg")
        tl.debug_barrier()
        tl.store(tickets + row, 0)
        tl.store(size, 0)
        listed = number <= LIST
        source = (tl.where(listed, number, vocab), listed, depths, ids, whole)
        score, token = cut_and_draw(source, top_k, top_p, least, tl.where(listed, goal, NO_GOAL), key, TILE)
        if scale > 0:
            place = tl.arange(0, SPAN)
            others = tl.load(scores + place, mask=place < parts, other=NEVER, cache_modifier=".cg")
            other_names = tl.load(names + place, mask=place < parts, other=ANY_ID, cache_modifier=".cg")
            other, name, _place = best_of(place, other_names, others)
            token = tl.where(beats(other, name, score, token), name, token)
            tl.store(masses + tl.arange(0, BUCKETS), tl.zeros([BUCKETS], tl.int64))
        token = tl.where(token < vocab, token, likeliest)
    return token, decides


@triton.jit
def _least(record):
    """The smallest y that min_p leaves."""
    min_p = real(record, MIN_P)
    return tl.where(min_p > 0, tl.log(min_p.to(tl.float64)).to(tl.float32), NEVER)


@triton.jit
def _is_cut(record, likeliest, token, line, best, temperature):
    """Whether the cuts may have removed the winner of all ids: then they must be made.

    The likeliest id survives every cut; what min_p alone leaves is seen from the winner's own value.
    """
    harder = (tl.load(record + TOP_K) > 0) | (real(record, TOP_P) < 1)
    cut = (token != likeliest) & (harder | (real(record, MIN_P) > 0))
    if cut & (harder == 0):
        cut = tempered(tl.load(line + token), best, temperature) < _least(record)
    return cut


@triton.jit(
    do_not_specialize=["rows_held", "R", "entries", "entry_words", "parts", "routes", "ends"],
    do_not_specialize_on_alignment=["positions", "slots", "logit_rows"],
)
def choose(
    logits: tl.tensor,
    cells: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    logit_rows: tl.tensor,
    decided: tl.tensor,
    quantities: tl.tensor,
    found: tl.tensor,
    groups: tl.tensor,
    depths: tl.tensor,
    ids: tl.tensor,
    sizes: tl.tensor,
    tickets: tl.tensor,
    scales: tl.tensor,
    masses: tl.tensor,
    scores: tl.tensor,
    names: tl.tensor,
    numbers: tl.tensor,
    settings: tl.tensor,
    row_route: tl.tensor,
    clock: tl.tensor,
    records: tl.tensor,
    rows_held,
    R,
    entries,
    entry_words,
    row_stride,
    vocab,
    parts,
    routes,
    ends,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Grid (parts, R). Part 0 of a row decides it; where cuts need the whole row, all parts gather candidates and the last
    one decides. `numbers` [4, rows_held] int64: token, index, seed, choice. `sizes`, `tickets` [rows_held + 1] and
    `masses` are zero after it; `scores` and `names` [rows_held, CHUNKS] are where parts leave their best."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    alive, record, index = row_of(row, logit_rows, positions, slots, cells, decided)
    token = tl.full([], 0, tl.int32)
    decides = part == 0
    if alive:
        plane = rows_held * CHUNKS
        line = logits + row.to(tl.int64) * row_stride
        quantities += row * CHUNKS
        found += row * CHUNKS
        best, token = likeliest_of(quantities, found, plane, CHUNKS, SPAN)
        temperature = real(record, TEMPERATURE)
        if (temperature > 0) & (best > NEVER):
            key = row_key(record, index)
            likeliest = token
            token = winner_of(line, quantities, found, best, temperature, key, plane, CHUNKS, SPAN)
            if _is_cut(record, likeliest, token, line, best, temperature):
                whole = (line, record, index, best, temperature)
                work = (depths, ids, sizes, tickets, scales, masses, scores, names)
                bests = quantities + plane * BEST
                token, decides = _cut(
                    row, part, parts, whole, likeliest, key, vocab, bests, groups, work,
                    LIST, TILE, CHUNK, CHUNKS, SPAN, BUCKETS,
                )  # fmt: skip
    if decides:
        tl.store(numbers + row, token.to(tl.int64))
        if routes:
            _tell_routes(row, alive, record, index, numbers, settings, row_route, rows_held, routes)
        if ends:
            tl.debug_barrier()
            if tl.atomic_add(tickets + rows_held, 1, sem="acq_rel", scope="gpu") == R - 1:
                tl.debug_barrier()
                tl.store(tickets + rows_held, 0)
                finish_rows(
                    numbers, numbers, cells, positions, slots, logit_rows, decided, clock, records, entries,
                    entry_words, rows_held, R, BLOCK, False, ON_DEVICE,
                )  # fmt: skip
