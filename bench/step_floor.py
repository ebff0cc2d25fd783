"""The least time that a step can take on a device: bytes that must move, and products that must be computed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from models.config import ModelConfig

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device was measured to do."""

    copy_bytes_per_s: float
    """Bytes read and written by a large copy on the device."""
    matmul_flop_per_s: float
    """Of a large product in the model's dtype."""

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        """Median of a few copies and products."""
        ceilings = cls(_copy_rate(device), _matmul_rate(device, dtype))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # so that what is free afterwards can be asked for
        return ceilings


@dataclass(frozen=True, slots=True)
class Work:
    """What one step cannot do without."""

    bytes: int
    """Weights once, K and V of every key once, the new ones included."""
    flop: int

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Least time; whichever of the two takes longer."""
        return 1e3 * max(self.bytes / ceilings.copy_bytes_per_s, self.flop / ceilings.matmul_flop_per_s)

    def bound(self, ceilings: Ceilings) -> str:
        """Which of the two that is."""
        moving = self.bytes / ceilings.copy_bytes_per_s >= self.flop / ceilings.matmul_flop_per_s
        return "bytes" if moving else "products"


def step_work(
    config: ModelConfig, element_bytes: int, *, runs: int, start: float, count: int, head_bytes: int = 0
) -> Work:
    """A step of `runs` runs of `count` rows from position `start` on, the logits of each run's last row wanted.

    Args:
        config: the model.
        element_bytes: of its weights and KV.
        head_bytes: what the routing algorithm reads.
    """
    head = config.vocab_size * config.hidden_size
    # An embedding of its own is read in a few rows only; a tied one is the LM head.
    matrices = config.parameters() - head * (1 if config.tied else 2)
    tokens = runs * (start + count)
    weights = (matrices + head) * element_bytes + head_bytes
    pairs = runs * count * (start + (count + 1) / 2)
    flop = 2 * runs * (count * matrices + head) + 4 * config.num_layers * config.q_size * pairs
    return Work(int(weights + tokens * config.kv_bytes_per_token(element_bytes)), int(flop))


def _copy_rate(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _MATMUL_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right, out = left.clone(), torch.empty_like(left)
    return 2 * size**3 / _seconds(lambda: torch.mm(left, right, out=out), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    return statistics.median(_timed(call, device) for _ in range(_REPEATS))


def _timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
