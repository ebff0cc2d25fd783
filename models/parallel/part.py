"""A rank's part of a model, whichever rank it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from models.config import ModelError
from models.cuda.kernels.overlap import can_overlap
from models.cuda.products import check_products
from models.cuda.shard import Shard
from models.parallel.link import Load
from models.rows import RowDecoder, Runs


class Part(RowDecoder, Protocol):
    """A row decoder that holds a shard of the weights, and K and V of the shard's heads."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on this device."""
        ...

    @property
    def kv_bytes_per_page(self) -> int:
        """Bytes that a page takes on this device."""
        ...

    def allocate_kv(self, num_pages: int) -> None:
        """Make room for so many pages."""
        ...

    def plans(self, rows: int, runs: Runs) -> bool:
        """See `Planner`; every rank says the same."""
        ...


Loader = Callable[[Load, Shard], Part]
"""Raises ModelError."""


def load_part(order: Load, shard: Shard) -> Part:
    """The CUDA decoder's part. Raises ModelError: naming file, field or device, that the memory does not suffice, or that products
    come out wrong on the part of the GPU that MPS leaves this rank."""
    from models.cuda.decoder import CudaDecoder

    try:
        part = CudaDecoder.load(
            order.path,
            device=order.device,
            dtype=order.dtype,
            load_format=order.load_format,
            page_size=order.page_size,
            vocab_size=order.vocab_size,
            context_length=order.context_length,
            shard=shard,
        )
        check_products(part.device, part.dtype, order.sm_percent, part.weights.matrix_shapes(), order.step_rows)
    except torch.OutOfMemoryError as error:
        share = f"1/{shard.world} of the weights of {order.path}"
        raise ModelError(f"{order.device}: not enough memory for {share}") from error
    part.ragged_prefill &= order.ragged_prefill
    part.overlap = can_overlap(part.device)
    return part


def allocate(part: Part, pages: int) -> None:
    """Make room for K and V. Raises ModelError."""
    try:
        part.allocate_kv(pages)
    except torch.OutOfMemoryError as error:
        wanted = pages * part.kv_bytes_per_page / 2**20
        raise ModelError(f"{part.device}: not enough memory for {pages} pages of K and V, {wanted:.0f} MiB") from error
