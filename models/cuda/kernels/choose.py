"""From a scan to one token per row; in the form without routes also to the end of the step."""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.cut import cut_and_draw, depth_of
from models.cuda.kernels.finish import finish_rows
from models.cuda.kernels.noise import exact_noise
from models.cuda.kernels.scan import (
    BEST,
    BEST_ID,
    FIRST,
    FIRST_ID,
    MASS,
    NEVER,
    SECOND,
    SECOND_ID,
    real,
    row_key,
    row_of,
    tempered,
    unbanned,
)
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

_MARGIN = tl.constexpr(1e-4)
"""Rough scores that differ by more are in the right order: their error is some 2e-5."""
_SLACK = tl.constexpr(1e-3)
"""What bounds are lowered by, for the rounding of the sums that they come from."""


@triton.jit
def _unfiltered(line, quantities, found, best, temperature, key, plane, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """The exact winner of the perturbed scores, without cuts. Three within the margin are beyond float32 in any case."""
    chunk = tl.arange(0, SPAN)
    inside = chunk < CHUNKS
    bests = tl.load(quantities + plane * BEST + chunk, mask=inside, other=NEVER)
    shift = tempered(bests, best, temperature)
    firsts = tl.load(quantities + plane * FIRST + chunk, mask=inside, other=NEVER) + shift
    seconds = tl.load(quantities + plane * SECOND + chunk, mask=inside, other=NEVER) + shift
    first_ids = tl.load(found + plane * FIRST_ID + chunk, mask=inside, other=0)
    second_ids = tl.load(found + plane * SECOND_ID + chunk, mask=inside, other=0)
    first, place = tl.max(firsts, axis=0, return_indices=True)
    winner = tl.sum(tl.where(chunk == place, first_ids, 0), axis=0)
    second, place_2 = tl.max(tl.where(chunk == place, seconds, firsts), axis=0, return_indices=True)
    runner_up = tl.sum(tl.where(chunk == place_2, tl.where(chunk == place, second_ids, first_ids), 0), axis=0)
    if first - second < _MARGIN:
        score = _exact_score(line, winner, best, temperature, key)
        score_2 = _exact_score(line, runner_up, best, temperature, key)
        other = (score_2 > score) | ((score_2 == score) & (runner_up < winner))
        winner = tl.where(other, runner_up, winner)
    return winner


@triton.jit
def _exact_score(line, name, best, temperature, key):
    return tempered(tl.load(line + name), best, temperature).to(tl.float64) - exact_noise(key, name)


@triton.jit
def _row_mass(quantities, best, temperature, plane, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """Sum of exp(y) over the whole row, float64."""
    chunk = tl.arange(0, SPAN)
    inside = chunk < CHUNKS
    bests = tl.load(quantities + plane * BEST + chunk, mask=inside, other=NEVER)
    masses = tl.load(quantities + plane * MASS + chunk, mask=inside, other=0.0)
    scale = tl.exp(tempered(bests, best, temperature))
    return tl.sum(tl.where(scale > 0, masses * scale, 0.0).to(tl.float64), axis=0)


@triton.jit
def _kth_best(bests, best, temperature, k, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """y of the k-th largest chunk maximum, below which nothing is among the k largest; -inf when there are fewer chunks."""
    chunk = tl.arange(0, SPAN)
    mine = tl.load(bests + chunk, mask=chunk < CHUNKS, other=NEVER)
    theirs = tl.load(bests + chunk, mask=chunk < CHUNKS, other=NEVER)[None, :]
    ahead = (theirs > mine[:, None]) | ((theirs == mine[:, None]) & (chunk[None, :] < chunk[:, None]))
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    value = tl.max(tl.where(rank == k - 1, mine, NEVER), axis=0)
    return tl.where(k <= CHUNKS, tempered(value, best, temperature), NEVER)


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
    """Append this program's share of the candidates with y >= floor to the row's list; `size` counts them all."""
    line, record, index, best, temperature = whole
    for chunk in range(part, CHUNKS, parts):
        if tempered(tl.load(bests + chunk), best, temperature) >= floor:
            name = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(line + name, mask=name < vocab, other=NEVER)
            y = tempered(unbanned(x, name, record, index), best, temperature)
            kept = (y >= floor) & (name < vocab)
            number = tl.sum(kept.to(tl.int32), axis=0)
            first = tl.atomic_add(size, number, sem="relaxed", scope="gpu")
            place = first + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            kept = kept & (place < LIST)
            tl.store(depths + place, depth_of(y), mask=kept)
            tl.store(ids + place, name, mask=kept)


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
    total,
    work,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The draw of a row under its cuts, and whether this program is the one that has made it."""
    line, record, index, best, temperature = whole
    depths, ids, sizes, tickets = work
    top_k = tl.load(record + TOP_K)
    top_p = real(record, TOP_P)
    least = _least(record)
    # What min_p drops still counts in the weight of the top_k likeliest, of which top_p keeps a share.
    floor = tl.where((top_k > 0) & (top_p < 1), NEVER, least - _SLACK)
    if top_k > 0:
        floor = tl.maximum(floor, _kth_best(bests, best, temperature, top_k, CHUNKS, SPAN))
    if top_p < 1:
        floor = tl.maximum(floor, tl.log((1 - top_p) * total.to(tl.float32) / vocab) - _SLACK)
    size = sizes + row
    depths += row.to(tl.int64) * LIST
    ids += row.to(tl.int64) * LIST
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
        token = cut_and_draw(source, top_k, top_p, least, total, key, TILE)
        token = tl.where(token < vocab, token, likeliest)
    return token, decides


@triton.jit
def _least(record):
    """The smallest y that min_p leaves."""
    min_p = real(record, MIN_P)
    return tl.where(min_p > 0, tl.log(min_p), NEVER)


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


@triton.jit(do_not_specialize=["rows_held", "R", "entries", "entry_words", "parts", "routes", "ends"])
def choose(
    logits: tl.tensor,
    cells: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    logit_rows: tl.tensor,
    decided: tl.tensor,
    quantities: tl.tensor,
    found: tl.tensor,
    depths: tl.tensor,
    ids: tl.tensor,
    sizes: tl.tensor,
    tickets: tl.tensor,
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
    BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Grid (parts, R). Part 0 of a row decides it; where cuts need the whole row, all parts gather candidates and the last
    one decides. `numbers` [4, rows_held] int64: token, index, seed, choice. `sizes`, `tickets` [rows_held + 1] are zero
    before and after."""
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
        chunk = tl.arange(0, SPAN)
        bests = quantities + plane * BEST
        best, place = tl.max(tl.load(bests + chunk, mask=chunk < CHUNKS, other=NEVER), axis=0, return_indices=True)
        token = tl.load(found + plane * BEST_ID + place)
        temperature = real(record, TEMPERATURE)
        if (temperature > 0) & (best > NEVER):
            key = row_key(record, index)
            likeliest = token
            token = _unfiltered(line, quantities, found, best, temperature, key, plane, CHUNKS, SPAN)
            if _is_cut(record, likeliest, token, line, best, temperature):
                total = tl.full([], 0.0, tl.float64)
                if real(record, TOP_P) < 1:
                    total = _row_mass(quantities, best, temperature, plane, CHUNKS, SPAN)
                whole = (line, record, index, best, temperature)
                work = (depths, ids, sizes, tickets)
                token, decides = _cut(
                    row, part, parts, whole, likeliest, key, vocab, bests, total, work, LIST, TILE, CHUNK, CHUNKS, SPAN
                )
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
