"""Exact top_k, top_p and min_p cuts of one row by one program, and the draw from what they leave.

Values are y = (x - largest x) / temperature <= 0 and travel as *depths*, the bits of -y: integers that rise as y falls. What a
cut keeps is a prefix in the order (depth, id), so a cut is a pair of bounds, found by bisection: no sorting.

Bundles that the functions pass on:
- row = (first logit, record, output index, largest logit, temperature);
- source = (count, listed, depths, ids, row): candidates in a list, or (not `listed`) the `count` ids of the row itself;
- head = (depths, ids, weights) of the source's first tile, which stays in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.noise import exact_noise
from models.cuda.kernels.scan import tempered, unbanned

DEEPEST = tl.constexpr(0x7F800000)
"""The depth of -inf."""
ANY_ID = tl.constexpr(0x7FFFFFFF)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def depth_of(y):
    """The bits of -y for y <= 0, int32."""
    return tl.maximum(-y, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def _height(depth):
    """y of a depth, float64."""
    return -depth.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _tile(start, source, TILE: tl.constexpr):
    """Depths and ids of the candidates start ..."""
    count, listed, depths, ids, row = source
    line, record, index, best, temperature = row
    place = start + tl.arange(0, TILE)
    inside = place < count
    if listed:
        depth = tl.load(depths + place, mask=inside, other=DEEPEST, cache_modifier=".cg")
        name = tl.load(ids + place, mask=inside, other=ANY_ID, cache_modifier=".cg")
    else:
        x = tl.load(line + place, mask=inside, other=_NEVER)
        x = unbanned(x, place, record, index)
        depth = depth_of(tempered(x, best, temperature))
        name = tl.where(inside, place, ANY_ID)
    return depth, name


@triton.jit
def _kept(depth, name, bound, last):
    return (name != ANY_ID) & ((depth < bound) | ((depth == bound) & (name <= last)))


@triton.jit
def _number_to(bound, last, head, source, TILE: tl.constexpr):
    """How many candidates lie up to (bound, last)."""
    depth, name, _weight = head
    number = tl.sum(_kept(depth, name, bound, last).to(tl.int32), axis=0)
    for start in range(TILE, source[0], TILE):
        far, far_name = _tile(start, source, TILE)
        number += tl.sum(_kept(far, far_name, bound, last).to(tl.int32), axis=0)
    return number


@triton.jit
def _weight_to(bound, last, head, source, TILE: tl.constexpr):
    """Sum of exp(y) of the candidates up to (bound, last), float64."""
    depth, name, weight = head
    total = tl.sum(tl.where(_kept(depth, name, bound, last), weight, 0.0), axis=0)
    for start in range(TILE, source[0], TILE):
        far, far_name = _tile(start, source, TILE)
        total += tl.sum(tl.where(_kept(far, far_name, bound, last), tl.exp(_height(far)), 0.0), axis=0)
    return total


@triton.jit
def _last_of_ties(bound, wanted, head, source, TILE: tl.constexpr):
    """The id up to which the candidates at the depth `bound` are kept: `wanted` of them."""
    above = _number_to(bound, -1, head, source, TILE)
    last = tl.full([], ANY_ID, tl.int32)
    if _number_to(bound, ANY_ID, head, source, TILE) - above > wanted:
        low = tl.full([], 0, tl.int32)
        for _ in range(31):
            middle = low + (last - low) // 2
            enough = _number_to(bound, middle, head, source, TILE) - above >= wanted
            last = tl.where(enough, middle, last)
            low = tl.where(enough, low, tl.minimum(middle + 1, last))
    return last


@triton.jit
def _top_k(k, head, source, TILE: tl.constexpr):
    """Bounds of the k likeliest."""
    bound = tl.full([], DEEPEST, tl.int32)
    low = tl.full([], 0, tl.int32)
    for _ in range(31):
        middle = low + (bound - low) // 2
        enough = _number_to(middle, ANY_ID, head, source, TILE) >= k
        bound = tl.where(enough, middle, bound)
        low = tl.where(enough, low, tl.minimum(middle + 1, bound))
    above = _number_to(bound, -1, head, source, TILE)
    return bound, _last_of_ties(bound, k - above, head, source, TILE)


@triton.jit
def _top_p(goal, deepest, head, source, TILE: tl.constexpr):
    """Bounds, not below `deepest`, of the smallest prefix with a weight of at least `goal`."""
    bound = tl.full([], 0, tl.int32)
    high = deepest
    for _ in range(31):
        middle = high - (high - bound) // 2
        short = _weight_to(middle, -1, head, source, TILE) < goal
        bound = tl.where(short, middle, bound)
        high = tl.where(short, high, tl.maximum(middle - 1, bound))
    # Of equal values the first ones are kept, as long as what is before them falls short.
    lacking = goal - _weight_to(bound, -1, head, source, TILE)
    each = tl.exp(_height(bound))
    wanted = tl.where(each > 0, tl.minimum(tl.ceil(lacking / tl.where(each > 0, each, 1.0)), 1e9), 1e9)
    return bound, _last_of_ties(bound, wanted.to(tl.int32), head, source, TILE)


@triton.jit
def _best_of(depth, name, bound, last, least, key):
    """The largest exact score of a tile's kept candidates and its id."""
    height = _height(depth)
    kept = _kept(depth, name, bound, last) & (height >= least)
    score = tl.where(kept, height - exact_noise(key, name), _NEVER)
    top = tl.max(score, axis=0)
    return top, tl.min(tl.where(kept & (score == top), name, ANY_ID), axis=0)


@triton.jit
def cut_and_draw(source, top_k, top_p, least, total, key, TILE: tl.constexpr):
    """The drawn id; ANY_ID when nothing is left.

    `least`: smallest y that min_p leaves; `total`: weight of the whole row in float64, for top_p without top_k.
    """
    depth, name = _tile(0, source, TILE)
    head = (depth, name, tl.exp(_height(depth)))
    bound = tl.full([], DEEPEST, tl.int32)
    last = tl.full([], ANY_ID, tl.int32)
    if top_k > 0:
        bound, last = _top_k(top_k, head, source, TILE)
        total = _weight_to(bound, last, head, source, TILE)
    if top_p < 1:
        nucleus, tie = _top_p(top_p.to(tl.float64) * total, bound, head, source, TILE)
        last = tl.where(nucleus == bound, tl.minimum(last, tie), tie)
        bound = nucleus
    top, chosen = _best_of(depth, name, bound, last, least, key)
    for start in range(TILE, source[0], TILE):
        far, far_name = _tile(start, source, TILE)
        score, found = _best_of(far, far_name, bound, last, least, key)
        better = (score > top) | ((score == top) & (found < chosen))
        top = tl.where(better, score, top)
        chosen = tl.where(better, found, chosen)
    return chosen
