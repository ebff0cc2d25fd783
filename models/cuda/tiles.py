"""How the CUDA decoder's attention is cut for a kind of step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_ROWS = 8
"""The attention's output product runs over so many rows at least: for one row cuBLAS takes a kernel of half the speed."""
SMALL_ROWS = 256
"""Up to so many token rows a step is taken for decode and short extends."""
FEW_ROWS = 128
"""Up to so many token rows, and `_ROWS_A_REQUEST` per logit row, most requests of a step have a row or two, and taller tiles would
be nearly empty. Beyond, those are faster all the same: see `_RUN_ROWS`."""
_ROWS_A_REQUEST = 2
"""Token rows of a tile in such steps. Qwen3-32B on an H200, contexts of 700 tokens in the mean, us a layer with tiles of 2 x 128
keys, 4 x 128 and 8 x 64: 52.9, 56.3 and 53.0 at 64 requests of one row, 44.2, 48.5 and 48.1 at 40 of three."""
_RUN_ROWS = 8
"""Token rows of a tile in other small steps: keys are read once for as many. Likewise: 63.7, 66.8 and 54.9 at 64 requests of
three rows, above 45, 45.4 and 35.5 at 16 of ten."""
_WIDE_ROWS = 4
"""The same where heads are so wide that no more fits."""
_LEAST_QUERY_ROWS = 16
"""Of a product on tensor cores."""
_MOST_QUERY_ROWS = 128
"""With so many a program takes 129 KB of shared memory of a Hopper's 227, 164 where blocks are of 128 keys, and 97 of the 99 of
the smallest GPUs."""
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
    rows: int, logit_rows: int, *, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, processors: int
) -> TileShape:
    """The cut for steps of one shape; the same arguments always give the same one.

    Args:
        rows: T.
        logit_rows: R, taken for the number of requests.
        group: query heads per KV head.
        kv_heads: KV heads on this device.
        head_dim: width of a head.
        dtype: of K and V.
        processors: multiprocessors of the device.
    """
    exact, small = dtype == torch.float32, rows <= SMALL_ROWS
    if exact or head_dim > 128:
        wanted = group if exact else _WIDE_ROWS * group if small else _MOST_QUERY_ROWS
        keys, stages = 32, 2
    elif not small:
        wanted, keys, stages = _MOST_QUERY_ROWS, 64, 2
    elif _few_each(rows, logit_rows) or _RUN_ROWS * group <= _LEAST_QUERY_ROWS:
        # What a program waits for is latency, which blocks of many keys pay less often.
        wanted, keys, stages = min(_ROWS_A_REQUEST * group, _MOST_QUERY_ROWS), 128, 3
    else:
        # Smaller blocks, of which more are under way, leave room for the query rows.
        wanted, keys, stages = min(_RUN_ROWS * group, _MOST_QUERY_ROWS), 64, 5
    query_rows = max(_LEAST_QUERY_ROWS, 1 << (wanted - 1).bit_length())
    return TileShape(
        query_rows=query_rows,
        keys=keys,
        least_keys=128 if small else 256,
        tasks=-(-_WAVES * processors // kv_heads),
        whole_blocks=not small,
        warps=8 if exact or query_rows > 64 else 4,
        stages=stages,
    )


def _few_each(rows: int, logit_rows: int) -> bool:
    return rows <= min(FEW_ROWS, _ROWS_A_REQUEST * logit_rows)
