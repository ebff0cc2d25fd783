"""Gives a CUDA decoder the megakernel as the way of its small steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.config import ModelConfig
from models.cuda.mega_weights import MegaWeights
from models.cuda.megakernel import Launcher, Megakernel, served_rows, unsupported
from models.cuda.nvcc import find_nvcc

if TYPE_CHECKING:
    from models.cuda.decoder import CudaDecoder


class FastSteps:
    """The kernel over a decoder's weights, for each KV pool that the decoder gets.

    Args:
        decoder: whose weights the kernel reads where they are.
        share: part of the SMs that the kernel takes; the others stay free for another model.
        launcher: how the kernel is started; None compiles it for the GPU.
    """

    def __init__(self, decoder: CudaDecoder, share: float = 1.0, launcher: Launcher | None = None) -> None:
        self._decoder = decoder
        self._launcher = launcher
        self._most_rows = served_rows(share)
        # All blocks must be resident at once.
        grid = max(1, int(share * decoder.processors))
        self.weights = MegaWeights(decoder.config, decoder.weights, vocab_size=decoder.vocab_size, grid=grid)

    def attach(self) -> None:
        """Build the kernel over the decoder's KV pool. Raises ModelError: it cannot be compiled, or pages do not suit it."""
        decoder = self._decoder
        decoder.fast_path = Megakernel(
            self.weights,
            k_cache=decoder.k_cache,
            v_cache=decoder.v_cache,
            rotations=decoder.rotations,
            launcher=self._launcher,
            most_rows=self._most_rows,
        )

    def detach(self) -> None:
        """Let go of the KV pool, so that it can be given back."""
        self._decoder.fast_path = None


def obstacle(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why a model of this shape gets no fast steps on a CUDA device; '' if it can have them."""
    properties = torch.cuda.get_device_properties(device)
    reason = unsupported(config, dtype, (properties.major, properties.minor))
    return reason or ("" if find_nvcc() else "nvcc, which compiles it, is not on the PATH or in CUDA_HOME")
