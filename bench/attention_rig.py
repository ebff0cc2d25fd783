"""Times one layer's attention on a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from bench.attention_load import AttentionLoad
from bench.step_floor import Ceilings
from models.config import ModelConfig
from models.cuda.captured_shapes import NO_SHAPE, Shapes
from models.cuda.graphs import GraphPool
from models.cuda.heads import HeadShape
from models.cuda.tiles import TileShape, choose_tiles
from models.device_runner import BUCKETS

PAGE = 16
"""Tokens."""
_CACHES = 4
"""K and V of all copies together, by the device's cache."""
_LAUNCHES = 32
_REPEATS = 9


class CutError(Exception):
    """The device cannot cut attention in such a way."""


class AttentionRig:
    """Attention of one layer of a model.

    Args:
        config: whose heads.
        device: a CUDA device.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.shape = HeadShape(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=PAGE,
            eps=config.rms_norm_eps,
        )
        self.group = self.shape.heads // self.shape.kv_heads
        properties = torch.cuda.get_device_properties(device)
        self.processors = properties.multi_processor_count
        self._cache_bytes = properties.L2_cache_size
        self._device = device
        self._rate = Ceilings.measure(device, torch.bfloat16).copy_bytes_per_s

    def in_use(self, rows: int, requests: int) -> TileShape:
        """The cut of a step of so many rows in which each request wants a token: that of the graph which serves it, if any."""
        shape = Shapes(BUCKETS, extends=True).of(rows, requests)
        return choose_tiles(
            *((rows, requests) if shape == NO_SHAPE else shape),
            group=self.group,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            dtype=torch.bfloat16,
            processors=self.processors,
        )

    def floor_us(self, load: AttentionLoad) -> float:
        """Least time of a step's attention: K and V of every key once."""
        return 1e6 * self._kv_bytes(load.keys) / self._rate

    def time_us(self, load: AttentionLoad, tiles: TileShape) -> float:
        """Microseconds of a launch; median of some graphs of `_LAUNCHES` launches.

        Raises:
            CutError: the kernel cannot be compiled so, or does not fit onto a multiprocessor; or a tile has no room for a token.
        """
        if tiles.query_rows < self.group:
            raise CutError(f"{self.group} query heads share a KV head, and all of a token's are in one tile")
        from triton import TritonError

        launch, pool = self._launcher(load, tiles), GraphPool(self._device)
        with torch.inference_mode():
            try:
                pool.warm_up(launch)
            except TritonError as error:
                raise CutError(" ".join(str(error).split())) from error
            graph = pool.capture(launch)
        graph.replay()
        return 1e3 * statistics.median(_elapsed_ms(graph) for _ in range(_REPEATS)) / _LAUNCHES

    def _launcher(self, load: AttentionLoad, tiles: TileShape) -> Callable[[], None]:
        from models.cuda.kernels.attention_tasks import list_tasks
        from models.cuda.kernels.paged_attention import AttentionScratch, paged_attention

        shape, rows = self.shape, len(load.positions)
        copies = max(1, min(_LAUNCHES, -(-_CACHES * self._cache_bytes // self._kv_bytes(load.keys))))

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.bfloat16, device=self._device)

        keys, values = (zeros(copies, load.pages, shape.kv_heads, PAGE, shape.head_dim) for _ in range(2))
        qkv = zeros(rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        out = zeros(rows, shape.heads * shape.head_dim)
        tasks = list_tasks(
            load.positions,
            load.leaders,
            load.counts,
            load.slots,
            runs=len(load.page_table),
            group=self.group,
            kv_heads=shape.kv_heads,
            shape=tiles,
        )
        scratch = AttentionScratch.of(tasks, shape, tiles)

        def launch() -> None:
            for number in range(_LAUNCHES):
                k, v = keys[number % copies], values[number % copies]
                paged_attention(qkv, k, v, out, tasks, scratch, load.positions, load.page_table, shape, tiles)

        return launch

    def _kv_bytes(self, keys: int) -> int:
        return 2 * 2 * keys * self.shape.kv_heads * self.shape.head_dim


def _elapsed_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
