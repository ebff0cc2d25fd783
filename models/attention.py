"""Paged causal attention over token rows in plain torch, each row independent of every other bit for bit.

Rows of one request are cut into query tiles of few fixed sizes, keys into blocks of a fixed length. A row's result is
the softmax over its own blocks: the largest score first (exact in any order), then per-block sums added one block after
the other. Keys past a row's position add exact zeros, so prefill, extend and decode give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from models.batch import Batch, IntArray
from models.linear import plan_batched

_BLOCK_TOKENS = 128
_GROUP_ELEMENTS = 1 << 19
"""Upper bound of the keys (or scores) that one group of tiles holds at a time, so that they stay in cache."""
_TILE_ROWS = (4, 16, 64)
"""Wanted sizes of query tiles, the heads of a group counted as rows: decode, short extend, prefill."""
_FLOOR = -80.0
"""Least exponent that is computed: exp is many times slower where it underflows, and e^-80 is lost in any sum."""


@dataclass(slots=True)
class _Tiles:
    """n query tiles of one size and the P key blocks that they read.

    A tile lies within one block of positions: that block, which a mask covers, is its edge; those before it are full.
    Pairs of tile and block are ordered: full blocks by ordinal, longest tiles first within each, then the edges.
    """

    rows: torch.Tensor
    """[n * Q] token row of each query; short tiles repeat their last."""
    pages: torch.Tensor
    """[kv_heads * P * pages per block] rows of a layer's pool: every head's own pages."""
    tile_of_pair: torch.Tensor
    """[kv_heads * P] tile of each pair, n further on for each head."""
    hidden: torch.Tensor
    """[n, M, block] of the edges: 0 where a query sees the key, -inf where not; M >= Q * group rows per tile."""
    shown: torch.Tensor
    """The same as 1 and 0."""
    widths: list[int]
    """Tiles that have an n-th full block, for n = 0, 1, ...: not rising."""
    queries: int
    """Q, token rows per tile."""

    def fold(self, values: torch.Tensor, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Combine values [kv_heads, P, ...] of each tile's pairs in block order: [kv_heads, n, ...]."""
        result = values[:, sum(self.widths) :]
        if self.widths:
            place = self.widths[0]
            full = values[:, :place]
            for width in self.widths[1:]:
                combine(full[:, :width], values[:, place : place + width], out=full[:, :width])
                place += width
            combine(result[:, : self.widths[0]], full, out=result[:, : self.widths[0]])
        return result


class PagedAttention:
    """KV storage and attention of every layer.

    Args:
        layers: number of layers.
        num_pages, page_size: of the pool; a layer holds K and V as [kv_heads * num_pages, page_size * head_dim], so
            that one head's pages gather into contiguous keys.
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
        self._layers, self._dtype = layers, dtype
        self.resize(num_pages)
        # Fresh memory of this size would be mapped and unmapped by the allocator at every use.
        self._block_scratch = torch.empty(0, dtype=dtype, device=device)
        self._score_scratch = torch.empty(0, device=device)
        self._group = heads // kv_heads
        self._pages_per_block = -(-_BLOCK_TOKENS // page_size)
        self._block = self._pages_per_block * page_size
        plan = plan_batched(self._block, head_dim, transposed=True, device=device)
        self._plan = plan.agree(plan_batched(self._block, head_dim, transposed=False, device=device))
        counts = [count for count in self._plan.counts if count >= self._group] or [self._group]
        sizes = (max(count for count in counts if count <= max(counts[0], size)) for size in _TILE_ROWS)
        self._tile_rows = tuple(dict.fromkeys(sizes))

    def resize(self, num_pages: int) -> None:
        """A pool of another size; what the old one held is gone, its memory free before the new one is taken."""
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._num_pages = num_pages
        shape = (self.kv_heads * num_pages, self.page_size * self.head_dim)
        for pool in (self._keys, self._values):
            pool += [torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(self._layers)]

    def prepare(self, batch: Batch) -> AttentionStep:
        """Where the batch's rows are written and read; shared by all layers of the step."""
        pages = batch.page_table[batch.slots, batch.positions // self.page_size].astype(np.int64)
        places = pages * self.page_size + batch.positions % self.page_size
        heads = np.arange(self.kv_heads) * (self._num_pages * self.page_size)
        return AttentionStep(self, len(batch), self._tensor(places[:, None] + heads), list(self._cut(batch)))

    def _cut(self, batch: Batch) -> Iterator[_Tiles]:
        """Tiles of every size, in groups of bounded cost, longest first."""
        block = batch.positions // self._block
        starts = np.flatnonzero(np.r_[True, (np.diff(batch.slots) != 0) | (np.diff(block) != 0)])
        ends = np.r_[starts[1:], len(batch)]
        for size in self._tile_rows:
            queries = max(1, size // self._group)
            # Runs too long for the largest tiles are cut into several; shorter ones take the smallest that holds them.
            chosen = ends - starts <= queries if size != self._tile_rows[-1] else starts < ends
            tiles = -(-(ends - starts)[chosen] // queries)
            first = np.repeat(starts[chosen], tiles) + queries * _ordinals(tiles)
            end = np.minimum(first + queries, np.repeat(ends[chosen], tiles))
            order = np.argsort(-block[first], kind="stable")
            cost = self._block * self.kv_heads * max(size, self.head_dim)
            place = 0
            while place < len(order):
                blocks = int(block[first[order[place]]]) + 1
                part = order[place : place + max(1, _GROUP_ELEMENTS // (blocks * cost))]
                yield self._tiles(batch, first[part], end[part], queries, size)
                place += len(part)
            starts, ends = starts[~chosen], ends[~chosen]

    def _tiles(self, batch: Batch, first: IntArray, end: IntArray, queries: int, size: int) -> _Tiles:
        count = len(first)
        full = batch.positions[first] // self._block
        widths = [int((full > ordinal).sum()) for ordinal in range(int(full[0]))]
        tile_of_pair = np.concatenate([np.arange(width) for width in (*widths, count)])
        ordinal = np.concatenate((np.repeat(np.arange(len(widths)), widths), full))
        columns = ordinal[:, None] * self._pages_per_block + np.arange(self._pages_per_block)
        # Columns past the table's end belong to keys past every position: any page will do, the mask hides it.
        columns = np.minimum(columns, batch.page_table.shape[1] - 1)
        pages = batch.page_table[batch.slots[first][tile_of_pair][:, None], columns].astype(np.int64).ravel()
        rows = np.minimum(first[:, None] + np.arange(queries), end[:, None] - 1)
        visible = np.ones((count, size, self._block), bool)
        offsets = (batch.positions[rows] - full[:, None] * self._block).repeat(self._group, axis=1)
        visible[:, : queries * self._group] = np.arange(self._block) <= offsets[:, :, None]
        heads = np.arange(self.kv_heads)[:, None]
        return _Tiles(
            rows=self._tensor(rows),
            pages=self._tensor(heads * self._num_pages + pages),
            tile_of_pair=self._tensor(heads * count + tile_of_pair),
            hidden=torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf))).to(self.device),
            shown=torch.from_numpy(visible.astype(np.float32)).to(self.device),
            widths=widths,
            queries=queries,
        )

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values.ravel()).to(self.device)

    def write(self, layer: int, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at each head's pool places [T * kv_heads]."""
        for pool, rows in ((self._keys[layer], k), (self._values[layer], v)):
            pool.view(-1, self.head_dim).index_copy_(0, places, rows.reshape(-1, self.head_dim))

    def attend(self, layer: int, tiles: _Tiles, q: torch.Tensor) -> torch.Tensor:
        """Attention of a group of tiles over scaled float32 q [T, heads * head_dim]; [n * Q, heads * head_dim]."""
        count, size, _ = tiles.hidden.shape
        full = sum(tiles.widths)
        shape = (count, tiles.queries, self.kv_heads, self._group, self.head_dim)
        used = tiles.queries * self._group
        queries = q.index_select(0, tiles.rows).view(shape).permute(2, 0, 1, 3, 4)
        queries = queries.reshape(self.kv_heads * count, used, self.head_dim)
        if used < size:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, size - used))
        keys = self._blocks(self._keys[layer], tiles)
        scores = self._scores(self._per_pair(queries, tiles), keys)
        by_head = scores.view(self.kv_heads, -1, size, self._block)
        edges = by_head[:, full:]
        edges += tiles.hidden
        top = tiles.fold(by_head.amax(dim=-1), torch.maximum).flatten(0, 1)
        scores -= self._per_pair(top, tiles)[:, :, None]
        scores.clamp_(min=_FLOOR).exp_()
        edges *= tiles.shown
        total = tiles.fold(by_head.sum(dim=-1), torch.add)
        out = scores.new_empty(len(scores), size, self.head_dim)
        out = self._product(scores, self._blocks(self._values[layer], tiles), out)
        out = tiles.fold(out.view(self.kv_heads, -1, size, self.head_dim), torch.add) / total[..., None]
        out = out[:, :, :used].reshape(self.kv_heads, count, tiles.queries, self._group, self.head_dim)
        return out.permute(1, 2, 0, 3, 4).reshape(len(tiles.rows), -1)

    def _blocks(self, pool: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
        """[kv_heads * P, block, head_dim] float32 keys or values of every pair."""
        count = len(tiles.pages) * pool.shape[1]
        if self._block_scratch.numel() < count:
            self._block_scratch = self._block_scratch.new_empty(count)
        picked = self._block_scratch[:count].view(-1, pool.shape[1])
        return torch.index_select(pool, 0, tiles.pages, out=picked).view(-1, self._block, self.head_dim).float()

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[kv_heads * P, M, block], valid until the next call."""
        count = len(keys) * queries.shape[1] * self._block
        if self._score_scratch.numel() < count:
            self._score_scratch = self._score_scratch.new_empty(count)
        out = self._score_scratch[:count].view(len(keys), -1, self._block)
        return self._product(queries, keys.transpose(1, 2), out)

    def _per_pair(self, values: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
        """Values [kv_heads * n, ...] of tiles spread over their pairs: [kv_heads * P, ...]."""
        return values.index_select(0, tiles.tile_of_pair) if tiles.widths else values

    def _product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Batched product with row counts that the plan allows."""
        if left.shape[1] in self._plan.counts:
            return torch.bmm(left, right, out=out)
        for row in range(left.shape[1]):
            out[:, row : row + 1] = torch.bmm(left[:, row : row + 1], right)
        return out


@dataclass(slots=True)
class AttentionStep:
    """One batch's view of the KV storage."""

    attention: PagedAttention
    count: int
    places: torch.Tensor
    groups: list[_Tiles]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Write k and v of all rows, then attend.

        Args:
            layer: index of the layer.
            q: [T or more, heads, head_dim], rotated; rows past the batch's T are padding.
            k, v: [T or more, kv_heads, head_dim].
            scale: of the scores; None is head_dim ** -0.5.

        Returns:
            [T or more, heads * head_dim] in q's dtype; padding rows are zero.
        """
        self.attention.write(layer, self.places, k[: self.count], v[: self.count])
        scaled = q.flatten(1).float() * (self.attention.head_dim**-0.5 if scale is None else scale)
        out = torch.zeros_like(scaled)
        for tiles in self.groups:
            out.index_copy_(0, tiles.rows, self.attention.attend(layer, tiles, scaled))
        return out.to(q.dtype)


def _ordinals(counts: IntArray) -> IntArray:
    """0 .. count-1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
