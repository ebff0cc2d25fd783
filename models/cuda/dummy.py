"""Random weights made on the device, for benchmarks: they need nothing but a config.json."""

from __future__ import annotations

import zlib

import torch

from models.config import ModelConfig
from models.weights import expected_tensors

_SCALE = 0.02
"""Standard deviation: what most models of this kind were initialised with."""


class DummyWeights:
    """A `TensorSource`: norms are 1, all else is normal; equal arguments give equal values on one kind of device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._shapes = dict(expected_tensors(config))
        self._dtype = dtype
        self._generator = torch.Generator(device)
        self._seed = seed

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """This part of the tensor; every part is cut from the same whole, so that ranks agree."""
        shape, device = self._shapes[name], self._generator.device
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=device)[index]
        self._generator.manual_seed(self._seed << 32 | zlib.crc32(name.encode()))
        whole = torch.empty(shape, dtype=self._dtype, device=device)
        return whole.normal_(0.0, _SCALE, generator=self._generator)[index]
