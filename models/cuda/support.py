"""What the CUDA decoder can run, said before any weights are read."""

from __future__ import annotations

import importlib.util
import os

import torch

from models.config import ModelConfig, ModelError

LEAST_CAPABILITY = (8, 0)
"""bfloat16 tensor cores and asynchronous copies: Ampere."""
HEAD_DIMS = (16, 32, 64, 128, 256)


def check_model(config: ModelConfig, source: str, page_size: int) -> None:
    """Raise ModelError where the kernels do not fit the model of `source`'s config.json or the pages."""
    if config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(f"{source}: head_dim: {config.head_dim} is not supported on CUDA; supported are {known}")
    if page_size < 1:
        raise ModelError(f"{source}: page_size must be at least 1, not {page_size}")


def check_device(device: torch.device) -> None:
    """Raise ModelError where the kernels cannot run on `device`; the CPU counts while Triton interprets them."""
    if importlib.util.find_spec("triton") is None:
        raise ModelError("the CUDA decoder needs triton, which is not installed: pip install triton")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return
    if device.type != "cuda":
        raise ModelError(f"device {device}: the CUDA decoder needs a CUDA device; use the torch backend")
    if not torch.cuda.is_available():
        raise ModelError(f"device {device}: no CUDA device is usable: check the driver with nvidia-smi")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ModelError(f"device {device}: there are only {torch.cuda.device_count()} CUDA devices")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        raise ModelError(
            f"device {device}: {torch.cuda.get_device_name(device)} has compute capability {have}, "
            f"the kernels need {least} (Ampere) or newer; use the torch backend"
        )
