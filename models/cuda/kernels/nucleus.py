"""top_p without top_k, whose nucleus may hold most of a vocabulary: two passes over the row by all programs.

The first, a kernel of its own, sums mass by bucket of y: from these sums the programs of the second know the one bucket in which
the nucleus ends. What is ahead of it is kept for sure; what lies in it goes to a list, from which one program draws exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.cut import ANY_ID, beats, best_of, depth_of
from models.cuda.kernels.mass import mass, share
from models.cuda.kernels.noise import exact_noise
from models.cuda.kernels.scan import BEST, LEAST, MASS, NEVER, real, row_key, row_of, tempered, unbanned
from models.cuda.kernels.slot_words import TEMPERATURE, TOP_K, TOP_P
from models.cuda.kernels.winner import likeliest_of, winner_of

SLACK = tl.constexpr(1e-3)
"""What bounds are lowered by, for the rounding of the sums that they come from."""
_NARROWEST = tl.constexpr(1e-30)


@triton.jit
def _bucket_of(y, scale, BUCKETS: tl.constexpr):
    """Rises as y falls; the last bucket has no end."""
    return tl.minimum(-y * scale, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _scale_of(
    quantities, best, temperature, top_p, plane, vocab, CHUNKS: tl.constexpr, SPAN: tl.constexpr, BUCKETS: tl.constexpr
):
    """Buckets per unit of y: all but the last one divide what lies above the smallest y and above any that can be kept.

    Ids that weigh less than (1 - top_p) of the mean have less than 1 - top_p of the mass in all, so that none of them is kept.
    Which buckets there are decides about speed alone.
    """
    chunk = tl.arange(0, SPAN)
    inside = chunk < CHUNKS
    shift = tempered(tl.load(quantities + plane * BEST + chunk, mask=inside, other=NEVER), best, temperature)
    masses = tl.load(quantities + plane * MASS + chunk, mask=inside, other=0.0)
    total = tl.sum(tl.where(shift > NEVER, masses * tl.exp(shift), 0.0), axis=0)
    floor = tl.log((1 - top_p) * total / vocab) - SLACK
    smallest = tl.min(tl.load(quantities + plane * LEAST + chunk, mask=inside, other=float("inf")), axis=0)
    span = tl.minimum(-floor, tl.maximum(-tempered(smallest, best, temperature), _NARROWEST))
    return (BUCKETS - 1) / span


@triton.jit
def heights(whole, chunk, vocab, CHUNK: tl.constexpr):
    """y and ids of a chunk; -inf past the vocabulary."""
    line, record, index, best, temperature = whole
    name = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(line + name, mask=name < vocab, other=NEVER)
    return tempered(unbanned(x, name, record, index), best, temperature), name


@triton.jit(
    do_not_specialize=["rows_held"],
    do_not_specialize_on_alignment=["positions", "slots", "logit_rows"],
)
def weigh(
    logits: tl.tensor,
    cells: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    logit_rows: tl.tensor,
    decided: tl.tensor,
    quantities: tl.tensor,
    found: tl.tensor,
    scales: tl.tensor,
    masses: tl.tensor,
    rows_held,
    row_stride,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """Grid (parts, R). `scales` [rows_held] gets 0 where nothing is to be cut this way; `masses` [rows_held, BUCKETS] int64 is
    zero before."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    alive, record, index = row_of(row, logit_rows, positions, slots, cells, decided)
    top_p = real(record, TOP_P)
    temperature = real(record, TEMPERATURE)
    scale = tl.full([], 0.0, tl.float32)
    if alive & (top_p < 1) & (temperature > 0) & (tl.load(record + TOP_K) == 0):
        plane = rows_held * CHUNKS
        line = logits + row.to(tl.int64) * row_stride
        quantities += row * CHUNKS
        found += row * CHUNKS
        best, likeliest = likeliest_of(quantities, found, plane, CHUNKS, SPAN)
        if best > NEVER:
            key = row_key(record, index)
            token = winner_of(line, quantities, found, best, temperature, key, plane, CHUNKS, SPAN)
            if token != likeliest:
                scale = _scale_of(quantities, best, temperature, top_p, plane, vocab, CHUNKS, SPAN, BUCKETS)
                whole = (line, record, index, best, temperature)
                own = masses + row.to(tl.int64) * BUCKETS
                rest = tl.full([], 0, tl.int64)
                for chunk in range(part, CHUNKS, tl.num_programs(0)):
                    y, _name = heights(whole, chunk, vocab, CHUNK)
                    weight = mass(y.to(tl.float64))
                    bucket = _bucket_of(y, scale, BUCKETS)
                    # Most ids are often in the last one: a sum of its own, for atomics of one address follow one another.
                    tail = bucket == BUCKETS - 1
                    spread = (weight > 0) & (tail == 0)
                    tl.atomic_add(own + bucket, weight, mask=spread, sem="relaxed", scope="gpu")
                    rest += tl.sum(tl.where(tail, weight, 0), axis=0)
                tl.atomic_add(own + BUCKETS - 1, rest, sem="relaxed", scope="gpu")
    if part == 0:
        tl.store(scales + row, scale)


@triton.jit
def edge_of(masses, top_p, BUCKETS: tl.constexpr):
    """The bucket in which the nucleus ends, and the mass that it may still take there."""
    bucket = tl.arange(0, BUCKETS)
    each = tl.load(masses + bucket)
    goal = share(top_p, tl.sum(each, axis=0))
    edge = tl.sum((tl.cumsum(each, axis=0) < goal).to(tl.int32), axis=0)
    return edge, goal - tl.sum(tl.where(bucket < edge, each, 0), axis=0)


@triton.jit
def append(kept, y, name, depths, ids, size, LIST: tl.constexpr):
    """Put candidates at the end of a row's list; `size` counts them all."""
    number = tl.sum(kept.to(tl.int32), axis=0)
    first = tl.atomic_add(size, number, sem="relaxed", scope="gpu")
    place = first + tl.cumsum(kept.to(tl.int32), axis=0) - 1
    kept = kept & (place < LIST)
    tl.store(depths + place, depth_of(y), mask=kept)
    tl.store(ids + place, name, mask=kept)


@triton.jit
def gather_nucleus(
    whole,
    vocab,
    least,
    key,
    edge,
    scale,
    bests,
    depths,
    ids,
    size,
    part,
    parts,
    LIST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """List this program's share of the edge bucket; score and id of the best of what is ahead of it."""
    best, temperature = whole[3], whole[4]
    top = tl.full([], NEVER, tl.float64)
    chosen = tl.full([], ANY_ID, tl.int32)
    for chunk in range(part, CHUNKS, parts):
        if _bucket_of(tempered(tl.load(bests + chunk), best, temperature), scale, BUCKETS) <= edge:
            y, name = heights(whole, chunk, vocab, CHUNK)
            bucket = _bucket_of(y, scale, BUCKETS)
            drawn = (bucket < edge) & (y >= least) & (name < vocab)
            score = tl.where(drawn, y.to(tl.float64) - exact_noise(key, name), NEVER)
            chunk_top, other, _depth = best_of(bucket, name, score)
            better = beats(chunk_top, other, top, chosen)
            top = tl.where(better, chunk_top, top)
            chosen = tl.where(better, other, chosen)
            append((bucket == edge) & (name < vocab), y, name, depths, ids, size, LIST)
    return top, chosen
