"""The exact winner of a row's perturbed scores, without cuts, from what a scan has found in each chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from models.cuda.kernels.noise import exact_noise
from models.cuda.kernels.scan import BEST, BEST_ID, FIRST, FIRST_ID, NEVER, SECOND, SECOND_ID, tempered

_MARGIN = tl.constexpr(1e-4)
"""Rough scores that differ by more are in the right order: their error is some 2e-5."""


@triton.jit
def likeliest_of(quantities, found, plane, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """The row's largest logit that is not banned, and its lowest id."""
    chunk = tl.arange(0, SPAN)
    bests = tl.load(quantities + plane * BEST + chunk, mask=chunk < CHUNKS, other=NEVER)
    best, place = tl.max(bests, axis=0, return_indices=True)
    return best, tl.load(found + plane * BEST_ID + place)


@triton.jit
def winner_of(line, quantities, found, best, temperature, key, plane, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """Its id. Three within the margin are beyond float32 in any case."""
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
