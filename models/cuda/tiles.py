"""How the CUDA decoder's attention is cut for a kind of step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from models.cuda.kernels.attention_tasks import TileShape

SPLIT_ROWS = 256
"""Up to so many token rows the keys of a tile may be split over tasks though the host does not know the runs."""
_TILE_ROWS = 4
"""Token rows of a run that share a tile in small steps: what an extend usually brings."""
_WAVES = 2
"""Tasks per multiprocessor that long contexts are spread over."""


def choose_tiles(
    rows: int, *, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, processors: int, planned: bool
) -> TileShape:
    """The cut for steps of `rows` token rows; the same arguments always give the same one.

    Args:
        rows: T.
        group: query heads per KV head.
        kv_heads: KV heads on this device.
        head_dim: width of a head.
        dtype: of K and V.
        processors: multiprocessors of the device.
        planned: the host knows the runs, so that the number of tiles is bounded by them and not by T.
    """
    from models.cuda.kernels.attention_tasks import UNSPLIT, TileShape

    split = planned or rows <= SPLIT_ROWS
    exact = dtype == torch.float32
    small = exact or rows <= SPLIT_ROWS
    wanted = 128 if not small else group if exact else _TILE_ROWS * group
    query_rows = max(16, 1 << (wanted - 1).bit_length())
    return TileShape(
        query_rows=query_rows,
        keys=32 if exact or head_dim > 128 else 64,
        least_keys=128 if split else UNSPLIT,
        tasks=-(-_WAVES * processors // kv_heads) if split else 0,
        warps=8 if exact or query_rows > 64 else 4,
        # Pages are looked up before keys are loaded, which takes stages as well: 5 keep two blocks of keys on their way.
        stages=5 if small and not exact and head_dim <= 128 else 2,
    )
