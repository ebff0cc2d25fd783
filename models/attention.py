"""Paged causal attention over token rows in plain torch, each row independent of every other bit for bit.

Rows of one request are cut into query tiles of few fixed sizes, keys into blocks of a fixed length. A row's result is
the softmax over its own blocks, taken in order: largest score first (exact in any order), then per-block sums added
one after the other. A block beyond a row's position adds exact zeros, so prefill, extend and decode give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.batch import Batch
from models.linear import plan_batched

_BLOCK_TOKENS = 128
_GROUP_ELEMENTS = 1 << 20
"""Upper bound of the keys (or scores) that one group of tiles holds at a time, so that they stay in cache."""


@dataclass(slots=True)
class _Tiles:
    """Query tiles of one size and the key blocks that they read, ordered by block ordinal, longest tiles first."""

    rows: torch.Tensor
    """[n * Q] token row of each query; short tiles repeat their last."""
    kept_rows: torch.Tensor
    """[kept] token rows in the order of `kept`."""
    kept: torch.Tensor
    """[kept] places within [n * Q] that are no repetition."""
    pages: torch.Tensor
    """[P * pages per block] pages of each (tile, block) pair."""
    tile_of_pair: torch.Tensor
    """[P] which tile the pair belongs to."""
    mask: torch.Tensor
    """[P, Q * group (padded), block] float32, 0 where a query sees a key and -inf where not."""
    widths: list[int]
    """Tiles that have an n-th block, for n = 0, 1, ...: not rising, summing to P."""
    queries: int
    """Q, token rows per tile."""


class PagedAttention:
    """KV storage and attention of every layer.

    Args:
        layers: number of layers.
        num_pages, page_size: of the pool; each layer holds K and V as [kv_heads, num_pages, page_size, head_dim], so
            that the pages of one head gather into one contiguous run of keys.
        heads, kv_heads, head_dim: of the model.
        dtype: of the stored keys and values; scores and sums are float32.
        device: where all of it lives.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_pages: int,
        page_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.device = device
        shape = (kv_heads, num_pages, page_size * head_dim)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._group = heads // kv_heads
        self._pages_per_block = -(-_BLOCK_TOKENS // page_size)
        self._block = self._pages_per_block * page_size
        plan = plan_batched(self._block, head_dim, transposed=True, device=device)
        self._plan = plan.agree(plan_batched(self._block, head_dim, transposed=False, device=device))
        self._tile_rows = self._choose_tile_rows()

    def _choose_tile_rows(self) -> tuple[int, ...]:
        """Query rows per tile, heads of a group together, smallest first: decode, short extend, prefill."""
        counts = [count for count in self._plan.counts if count >= self._group] or [self._group]
        smallest = counts[0]
        chosen = [max(count for count in counts if count <= max(smallest, size)) for size in (4, 16, 64)]
        return tuple(dict.fromkeys(chosen))

    def prepare(self, batch: Batch) -> AttentionStep:
        """Where the batch's rows are written and read; shared by all layers of the step."""
        pages = batch.page_table[batch.slots, batch.positions // self.page_size].astype(np.int64)
        places = torch.from_numpy(pages * self.page_size + batch.positions % self.page_size)
        groups = [group for tiles in self._cut(batch) for group in tiles]
        return AttentionStep(self, places.to(self.device), groups)

    def _cut(self, batch: Batch) -> Iterator[Iterator[_Tiles]]:
        starts = np.flatnonzero(np.r_[True, batch.slots[1:] != batch.slots[:-1]])
        counts = np.diff(np.r_[starts, len(batch)])
        for place, size in enumerate(self._tile_rows):
            queries = max(1, size // self._group)
            last = place == len(self._tile_rows) - 1
            # Whatever is too long for the largest tiles is cut into several; the rest goes to the next smaller size.
            chosen = (counts > 0) if last else (counts <= queries) & (counts > 0)
            tiles = np.where(chosen, -(-counts // queries), 0)
            if tiles.any():
                first = np.repeat(starts, tiles) + queries * _ordinals(tiles)
                end = np.minimum(first + queries, np.repeat(starts + counts, tiles))
                yield self._groups(batch, first, end, queries, size)
            counts = np.where(chosen, 0, counts)

    def _groups(
        self, batch: Batch, first: npt.NDArray[np.int64], end: npt.NDArray[np.int64], queries: int, size: int
    ) -> Iterator[_Tiles]:
        """Tiles [first, end) in groups of bounded size, longest first."""
        blocks = batch.positions[end - 1] // self._block + 1
        order = np.argsort(-blocks, kind="stable")
        cost = self._block * self.kv_heads * max(size, self.head_dim)
        start = 0
        while start < len(order):
            # At least one tile, else as many as fit when all are as long as the first.
            count = max(1, _GROUP_ELEMENTS // (int(blocks[order[start]]) * cost))
            part = order[start : start + count]
            yield self._tiles(batch, first[part], end[part], blocks[part], queries, size)
            start += count

    def _tiles(
        self,
        batch: Batch,
        first: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        queries: int,
        size: int,
    ) -> _Tiles:
        offsets = np.arange(queries)
        rows = np.minimum(first[:, None] + offsets, end[:, None] - 1)
        kept = np.flatnonzero((first[:, None] + offsets < end[:, None]).ravel())
        widths = [int((blocks > ordinal).sum()) for ordinal in range(int(blocks[0]))]
        tile_of_pair = np.concatenate([np.arange(width) for width in widths])
        ordinal = np.repeat(np.arange(len(widths)), widths)
        columns = ordinal[:, None] * self._pages_per_block + np.arange(self._pages_per_block)
        # Columns past the table's end belong to keys past every position: any page will do, the mask hides it.
        columns = np.minimum(columns, batch.page_table.shape[1] - 1)
        pages = batch.page_table[batch.slots[first][tile_of_pair][:, None], columns].astype(np.int64)
        positions = torch.from_numpy(batch.positions[rows][tile_of_pair] - ordinal[:, None] * self._block)
        visible = torch.arange(self._block) <= positions[:, :, None]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        mask = mask.repeat_interleave(self._group, dim=1)
        if mask.shape[1] < size:
            mask = torch.nn.functional.pad(mask, (0, 0, 0, size - mask.shape[1]))
        flat = rows.ravel()
        return _Tiles(
            rows=torch.from_numpy(flat).to(self.device),
            kept_rows=torch.from_numpy(flat[kept]).to(self.device),
            kept=torch.from_numpy(kept).to(self.device),
            pages=torch.from_numpy(pages.ravel()).to(self.device),
            tile_of_pair=torch.from_numpy(tile_of_pair).to(self.device),
            mask=mask.to(self.device),
            widths=widths,
            queries=queries,
        )

    def write(self, layer: int, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at the pool places [T]."""
        for pool, rows in ((self._keys[layer], k), (self._values[layer], v)):
            pool.view(self.kv_heads, -1, self.head_dim).index_copy_(1, places, rows.transpose(0, 1).to(pool.dtype))

    def attend(self, layer: int, tiles: _Tiles, q: torch.Tensor) -> torch.Tensor:
        """Attention of a group of tiles over q [T, heads, head_dim], scaled; returns [kept rows, heads, head_dim]."""
        size = tiles.mask.shape[1]
        used = tiles.queries * self._group
        count = len(tiles.rows) // tiles.queries
        queries = q[tiles.rows].view(count, tiles.queries, self.kv_heads, self._group, self.head_dim)
        queries = queries.permute(2, 0, 1, 3, 4).reshape(self.kv_heads, count, used, self.head_dim)
        if used < size:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, size - used))
        scores = self._product(queries[:, tiles.tile_of_pair], self._blocks(self._keys[layer], tiles).transpose(2, 3))
        scores += tiles.mask
        top = _fold(scores.amax(dim=-1), tiles.widths, torch.maximum)
        scores -= top[:, tiles.tile_of_pair, :, None]
        weights = scores.exp_()
        total = _fold(weights.sum(dim=-1), tiles.widths, torch.add)
        out = _fold(self._product(weights, self._blocks(self._values[layer], tiles)), tiles.widths, torch.add)
        out = (out / total[..., None])[:, :, :used]
        out = out.view(self.kv_heads, count * tiles.queries, self._group, self.head_dim)[:, tiles.kept]
        return out.transpose(0, 1).reshape(len(tiles.kept), self.heads, self.head_dim)

    def _blocks(self, pool: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
        """[kv_heads, P, block, head_dim] float32 keys or values of every pair."""
        picked = pool.index_select(1, tiles.pages)
        return picked.view(self.kv_heads, len(tiles.tile_of_pair), self._block, self.head_dim).float()

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Batched product over [kv_heads, P], with row counts that the plan allows."""
        left, right_flat = left.flatten(0, 1), right.flatten(0, 1)
        if left.shape[1] in self._plan.counts:
            out = torch.bmm(left, right_flat)
        else:
            out = torch.cat([torch.bmm(left[:, row : row + 1], right_flat) for row in range(left.shape[1])], dim=1)
        return out.view(self.kv_heads, -1, *out.shape[1:])


@dataclass(slots=True)
class AttentionStep:
    """One batch's view of the KV storage."""

    attention: PagedAttention
    places: torch.Tensor
    groups: list[_Tiles]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v of all rows, then attend.

        Args:
            layer: index of the layer.
            q: [T or more, heads, head_dim], rotated; rows past the batch's T are padding.
            k, v: [T or more, kv_heads, head_dim].

        Returns:
            [T or more, heads * head_dim] in q's dtype; padding rows are zero.
        """
        count = len(self.places)
        self.attention.write(layer, self.places, k[:count], v[:count])
        scaled = q.float() * self.attention.head_dim**-0.5
        out = torch.zeros_like(q)
        for tiles in self.groups:
            out[tiles.kept_rows] = self.attention.attend(layer, tiles, scaled).to(q.dtype)
        return out.flatten(1)


def _ordinals(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0 .. count-1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _fold(values: torch.Tensor, widths: list[int], combine: object) -> torch.Tensor:
    """Combine [kv_heads, P, ...] per tile, block after block: [kv_heads, n, ...]."""
    result = values[:, : widths[0]]
    place = widths[0]
    for width in widths[1:]:
        combine(result[:, :width], values[:, place : place + width], out=result[:, :width])  # type: ignore[operator]
        place += width
    return result
