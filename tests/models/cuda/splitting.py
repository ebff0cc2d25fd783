"""How FlashInfer 0.6.13 splits the keys of runs (`PrefillPlan` in attention/scheduler.cuh), told once more in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.cuda.heads import HeadShape

Lengths = tuple[int, int]
"""Of a run: its rows, and the tokens of its context with them."""


@dataclass(frozen=True)
class Plan:
    split: bool
    tiles: int
    """Of each KV head."""
    rows: int
    """Of a tile: pairs of a token row and a query head."""
    taken: int
    """Bytes of the workspace."""


def planned(runs: Sequence[Lengths], shape: HeadShape, processors: int) -> Plan:
    group = shape.heads // shape.kv_heads
    packed = [rows * group for rows, _ in runs]
    pages = [-(-context // shape.page_size) for _, context in runs]
    height = _height(sum(packed) // len(runs), shape.head_dim)

    def tiles(chunk: int) -> int:
        return sum(-(-rows // height) * -(-length // chunk) for rows, length in zip(packed, pages, strict=True))

    low, high = max(128 // shape.page_size, 1), max(pages)
    while low < high:
        middle = (low + high) // 2
        if tiles(middle) > 2 * processors // shape.kv_heads:
            low = middle + 1
        else:
            high = middle
    split, count = low < max(pages), tiles(low)
    values = shape.heads * count * height * shape.head_dim * 4
    scales = shape.heads * count * height * 4
    return Plan(split, count, height, -(-values // 16) * 16 + scales if split else 0)


def _height(mean: int, head_dim: int) -> int:
    if mean > 64 and head_dim < 256:
        return 128
    return 64 if mean > 16 else 16


def fullest(shape: HeadShape, processors: int, context: int) -> list[Lengths]:
    """Two runs that are split into as many tiles as there can be: a whole context in halves, and beside it one that stays whole."""
    limit = 2 * processors // shape.kv_heads
    halved = limit // 4
    height = _height(1 << 20, shape.head_dim)
    counts = [tiles * height * shape.kv_heads // shape.heads for tiles in (halved, limit - 2 * halved)]
    return [(counts[0], context), (counts[1], max(counts[1], context // 4))]
