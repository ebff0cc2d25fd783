"""Opens what a bench of steps runs on: a model whose decode state is on its device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelConfig, ModelError
from models.device_runner import DeviceRunner
from models.rows import RowDecoder
from models.torch_rows import TorchRows
from models.torch_runner import TorchRunner
from models.weights import resolve_dtype

_PAGE_SIZE = 16
_FREE_SHARE = 0.85
"""Of the memory that is free beside the weights, the part that KV may take; the rest is for graphs and large steps."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is opened."""

    directory: Path
    device: torch.device
    dtype: str
    dummy: bool
    """Random weights: the directory holds nothing but a config.json."""
    max_slots: int
    context_length: int
    kv_tokens: int
    """Most tokens of the KV pool; fewer where they do not fit."""
    depth: int
    megakernel: bool
    """Small steps run as one persistent kernel where the device and the model's shape allow it."""
    kernel_share: float = 1.0
    """Part of the multiprocessors that it takes."""


def open_runner(options: Options) -> DeviceRunner:
    """The runner, without routes and graphs. Raises ModelError."""
    pages = -(-options.kv_tokens // _PAGE_SIZE)
    decoder = _on_cuda(options, pages) if options.device.type == "cuda" else _on_cpu(options, pages)
    return DeviceRunner(
        decoder,
        max_slots=options.max_slots,
        max_pages=-(-options.context_length // _PAGE_SIZE),
        depth=options.depth,
    )


def _on_cuda(options: Options, pages: int) -> RowDecoder:
    from models.cuda.decoder import CudaDecoder
    from models.cuda.fast_steps import FastSteps

    decoder = CudaDecoder.load(
        options.directory,
        device=options.device,
        dtype=options.dtype,
        load_format="dummy" if options.dummy else "safetensors",
        page_size=_PAGE_SIZE,
        context_length=options.context_length,
    )
    fast = FastSteps(decoder, options.kernel_share) if options.megakernel and _has_kernel(options) else None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(options.device)
    decoder.allocate_kv(min(pages, int(_FREE_SHARE * free) // decoder.kv_bytes_per_page))
    if fast is not None:
        fast.attach()
    return decoder


def _has_kernel(options: Options) -> bool:
    """Whether the device and the model's shape allow it."""
    from models.cuda.fast_steps import obstacle

    config = ModelConfig.load(options.directory)
    if problem := obstacle(config, resolve_dtype(options.dtype, config), options.device):
        print(f"small steps are not run as one kernel: {problem}")
    return not problem


def _on_cpu(options: Options, pages: int) -> RowDecoder:
    if options.dummy:
        raise ModelError("random weights are made on a CUDA device only; name a checkpoint with --model")
    return TorchRows(
        TorchRunner.load(
            options.directory,
            dtype=options.dtype,
            num_pages=pages,
            page_size=_PAGE_SIZE,
            context_length=options.context_length,
        )
    )
