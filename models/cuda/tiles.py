"""How the CUDA decoder's attention is cut for a kind of step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_ROWS = 8
"""The attention's output product runs over so many rows at least: for one row cuBLAS takes a kernel of half the speed."""
SMALL_ROWS = 256
"""Up to so many token rows a step is taken for decode and short extends."""
_TILE_ROWS = 4
"""Token rows of a run that share a tile in small steps: what an extend usually brings."""
_WAVES = 2
"""Tasks per multiprocessor that long contexts are spread over."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How attention is cut, fixed when a step is captured."""

    query_rows: int
    """Query heads times token rows of a tile: 16, 32, 64, ..."""
    keys: int
    """Keys that a program handles at a time."""
    least_keys: int
    """Keys of a task at least, where the context has as many."""
    tasks: int
    """Tasks per KV head that the keys of all tiles are spread over, besides one for each tile."""
    whole_blocks: bool
    """Keys that all rows of a tile see are handled apart, without masks; pays where arithmetic is what takes the time."""
    warps: int
    stages: int


def choose_tiles(
    rows: int, *, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, processors: int
) -> TileShape:
    """The cut for steps of `rows` token rows; the same arguments always give the same one.

    Args:
        rows: T.
        group: query heads per KV head.
        kv_heads: KV heads on this device.
        head_dim: width of a head.
        dtype: of K and V.
        processors: multiprocessors of the device.
    """
    exact, small = dtype == torch.float32, rows <= SMALL_ROWS
    wanted = group if exact else _TILE_ROWS * group if small else 128
    query_rows = max(16, 1 << (wanted - 1).bit_length())
    if exact or head_dim > 128:
        keys, stages = 32, 2
    elif small:
        # What a program waits for is latency, which blocks of many keys pay less often.
        keys, stages = 128, 3
    else:
        keys, stages = 64, 2
    return TileShape(
        query_rows=query_rows,
        keys=keys,
        least_keys=128 if small else 256,
        tasks=-(-_WAVES * processors // kv_heads),
        whole_blocks=not small,
        warps=8 if exact or query_rows > 64 else 4,
        stages=stages,
    )
