"""Exact top_k, top_p and min_p cuts of one row by one program, and the draw from what they leave.

Values are y = (x - largest x) / temperature <= 0 and travel as *depths*, the bits of -y: integers that rise as y falls. What a
cut keeps is a prefix in the order (depth, id), so a cut is a pair of bounds. top_k finds its bounds by bisection. top_p needs
none: candidates are tried in falling order of their scores, and the first with too little mass ahead of it is the draw. Each one
that fails leaves only what is ahead of it, so that two or three are tried, rarely more.

Bundles that the functions pass on:
- row = (first logit, record, output index, largest logit, temperature);
- source = (count, listed, depths, ids, row): candidates in a list, or (not `listed`) the `count` ids of the row itself;
- head = (depths, ids, masses, scores) of the source's first tile, which stays in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.mass import mass, share
from models.cuda.kernels.noise import exact_noise
from models.cuda.kernels.scan import tempered, unbanned

DEEPEST = tl.constexpr(0x7F800000)
"""The depth of -inf."""
ANY_ID = tl.constexpr(0x7FFFFFFF)
NO_GOAL = tl.constexpr(-1)
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
def _rated(depth, name, least, key):
    """A tile with its masses and exact scores; what min_p drops is never drawn."""
    height = _height(depth)
    score = tl.where((name != ANY_ID) & (height >= least), height - exact_noise(key, name), _NEVER)
    return depth, name, mass(height), score


@triton.jit
def _kept(depth, name, bound, last):
    return (name != ANY_ID) & ((depth < bound) | ((depth == bound) & (name <= last)))


@triton.jit
def _number_to(bound, last, head, source, TILE: tl.constexpr):
    """How many candidates lie up to (bound, last)."""
    number = tl.sum(_kept(head[0], head[1], bound, last).to(tl.int32), axis=0)
    for start in range(TILE, source[0], TILE):
        far, far_name = _tile(start, source, TILE)
        number += tl.sum(_kept(far, far_name, bound, last).to(tl.int32), axis=0)
    return number


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
    # Of equal values the first ones are kept.
    last = tl.full([], ANY_ID, tl.int32)
    if _number_to(bound, ANY_ID, head, source, TILE) > k:
        low = tl.full([], 0, tl.int32)
        for _ in range(31):
            middle = low + (last - low) // 2
            enough = _number_to(bound, middle, head, source, TILE) >= k
            last = tl.where(enough, middle, last)
            low = tl.where(enough, low, tl.minimum(middle + 1, last))
    return bound, last


@triton.jit
def best_of(depth, name, score):
    """Largest score of a tile, its id (the lowest of equal ones) and that one's depth."""
    top = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == top, name, ANY_ID), axis=0)
    return top, chosen, tl.sum(tl.where(name == chosen, depth, 0), axis=0)


@triton.jit
def beats(score, name, top, chosen):
    """Whether a candidate is drawn rather than the one before it."""
    return (score > top) | ((score == top) & (name < chosen))


@triton.jit
def _survey(bound, last, least, key, head, source, TILE: tl.constexpr):
    """Mass of the candidates up to (bound, last), and what `best_of` says of them."""
    depth, name, masses, score = head
    kept = _kept(depth, name, bound, last)
    total = tl.sum(tl.where(kept, masses, 0), axis=0)
    top, chosen, deep = best_of(depth, name, tl.where(kept, score, _NEVER))
    for start in range(TILE, source[0], TILE):
        far, far_name = _tile(start, source, TILE)
        far, far_name, far_masses, far_score = _rated(far, far_name, least, key)
        far_kept = _kept(far, far_name, bound, last)
        total += tl.sum(tl.where(far_kept, far_masses, 0), axis=0)
        far_top, other, low = best_of(far, far_name, tl.where(far_kept, far_score, _NEVER))
        better = beats(far_top, other, top, chosen)
        top = tl.where(better, far_top, top)
        chosen = tl.where(better, other, chosen)
        deep = tl.where(better, low, deep)
    return total, top, chosen, deep


@triton.jit
def cut_and_draw(source, top_k, top_p, least, goal, key, TILE: tl.constexpr):
    """Score and id of the draw; the score is -inf when nothing is left.

    `least`: smallest y that min_p leaves; `goal`: the mass from which on nothing is kept, NO_GOAL for top_p of what top_k leaves
    of the source.
    """
    depth, name = _tile(0, source, TILE)
    head = _rated(depth, name, least, key)
    bound = tl.full([], DEEPEST, tl.int32)
    last = tl.full([], ANY_ID, tl.int32)
    if top_k > 0:
        bound, last = _top_k(top_k, head, source, TILE)
    total, top, chosen, deep = _survey(bound, last, least, key, head, source, TILE)
    if top_p < 1:
        goal = tl.where(goal == NO_GOAL, share(top_p, total), goal)
        outside = top > _NEVER
        while outside:
            ahead, score, other, low = _survey(deep, chosen - 1, least, key, head, source, TILE)
            outside = ahead >= goal
            top = tl.where(outside, score, top)
            chosen = tl.where(outside, other, chosen)
            deep = tl.where(outside, low, deep)
            outside = outside & (top > _NEVER)
    return top, chosen
