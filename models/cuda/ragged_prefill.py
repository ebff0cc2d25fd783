"""FlashInfer's paged prefill attention, for long runs whose lengths the host knows (its kernels take 16-bit types only)."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from models.batch import IntArray
from models.cuda.heads import HeadShape
from models.rows import Runs

DOCUMENTED_BYTES = 128 << 20
"""The workspace that FlashInfer's documentation recommends."""
_TILES_PER_PROCESSOR = 2
_PLANS = 2
"""Plans that may be queued; a plan's host memory is reused once the device has read it."""


def flashinfer_present() -> bool:
    """Whether FlashInfer can be imported."""
    return importlib.util.find_spec("flashinfer") is not None


def workspace_bytes(shape: HeadShape, processors: int) -> int:
    """The most that a plan takes of the workspace, and no less than is recommended, which does not do for 64 query heads.

    By `PrefillPlan` of FlashInfer 0.6.13 (attention/scheduler.cuh; 0.6.18 alike). A plan that leaves keys whole takes nothing.
    One that splits them has `_TILES_PER_PROCESSOR` tiles for each multiprocessor at most, over all KV heads, and takes a float32
    sum of values and a float32 scale for every row of a tile and every query head, those of other KV heads among them.

    Args:
        shape: of the heads on this device.
        processors: its multiprocessors, counted as FlashInfer counts them: as this process sees them, which MPS may limit.
    """
    tiles = _TILES_PER_PROCESSOR * processors // shape.kv_heads
    # The plan's tallest; it takes lower ones where runs are short.
    rows = 128 if shape.head_dim < 256 else 64
    return max(shape.heads * tiles * rows * (shape.head_dim + 1) * torch.float32.itemsize, DOCUMENTED_BYTES)


class RaggedPrefill:
    """Attention of runs of any lengths in one call, planned anew for every step.

    Args:
        shape: of the heads.
        dtype: of q, K and V: a 16-bit one.
        device: of the tensors.
        processors: its multiprocessors, as of `workspace_bytes`.
    """

    def __init__(self, shape: HeadShape, dtype: torch.dtype, device: torch.device, processors: int) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._shape = shape
        self._dtype = dtype
        # FlashInfer's own 8 MiB of tiles' and rows' numbers last for steps of hundreds of thousands of rows.
        workspace = torch.empty(workspace_bytes(shape, processors), dtype=torch.uint8, device=device)
        self._plans: list[tuple[Any, torch.cuda.Event]] = [
            (BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend="fa2"), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(_PLANS)
        ]
        self._rows = 0

    def plan(self, runs: Runs, page_table: torch.Tensor) -> None:
        """Prepare a step's calls of `attend`; waits if the device is more than `_PLANS` steps behind."""
        self._plans.append(self._plans.pop(0))
        wrapper, read = self._plans[-1]
        read.synchronize()
        shape = self._shape
        lengths = runs.starts + runs.counts
        pages = -(-lengths // shape.page_size)
        self._rows = int(runs.counts.sum())
        wrapper.plan(
            _offsets(runs.counts),
            _offsets(pages),
            _page_numbers(runs.slots, pages, page_table),
            torch.from_numpy(((lengths - 1) % shape.page_size + 1).astype(np.int32)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        read.record()

    def attend(self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """As `paged_attention`, for the runs of the last plan, which are the first rows of `qkv`."""
        shape = self._shape
        q = qkv[: self._rows, : shape.heads * shape.head_dim].view(self._rows, shape.heads, shape.head_dim)
        target = out[: self._rows].view(self._rows, shape.heads, shape.head_dim)
        self._plans[-1][0].run(q, (keys, values), out=target)


def _offsets(counts: IntArray) -> torch.Tensor:
    """[G + 1] int32 on the host: where each run's share begins, and the end."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


def _page_numbers(slots: IntArray, pages: IntArray, page_table: torch.Tensor) -> torch.Tensor:
    """The first `pages` entries of each slot's row of the page table, one after the other, on its device."""
    width = page_table.shape[1]
    ordinals = np.arange(pages.sum()) - np.repeat(np.cumsum(pages) - pages, pages)
    places = torch.from_numpy(np.repeat(slots, pages) * width + ordinals)
    if page_table.is_cuda:
        places = places.pin_memory().to(page_table.device, non_blocking=True)
    return page_table.flatten().index_select(0, places)
