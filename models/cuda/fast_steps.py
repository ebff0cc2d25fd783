"""Gives a CUDA decoder the megakernel as the way of its small steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.cuda.megakernel import Launcher, Megakernel, unsupported
from models.cuda.packed_weights import PackedWeights

if TYPE_CHECKING:
    from models.cuda.decoder import CudaDecoder

COPY_SHARE = 8
"""The packed copy of the weights may take this part of the device's memory: larger steps still read the plain matrices."""


class FastSteps:
    """A packed copy of a decoder's weights, and the kernel over it for each KV pool that the decoder gets.

    Args:
        decoder: its weights are packed here; `obstacle` says whether they can be.
        launcher: how the kernel is started; None compiles it for the GPU.
    """

    def __init__(self, decoder: CudaDecoder, launcher: Launcher | None = None) -> None:
        self._decoder = decoder
        self._launcher = launcher
        self.weights = _pack(decoder)

    def attach(self) -> None:
        """Build the kernel over the decoder's KV pool. Raises ModelError: it cannot be compiled, or pages do not suit it."""
        decoder = self._decoder
        decoder.fast_path = Megakernel(
            self.weights,
            k_cache=decoder.k_cache,
            v_cache=decoder.v_cache,
            rotations=decoder.rotations,
            launcher=self._launcher,
        )

    def detach(self) -> None:
        """Let go of the KV pool, so that it can be given back."""
        self._decoder.fast_path = None


def obstacle(decoder: CudaDecoder) -> str:
    """Why a decoder on a CUDA device gets no fast steps; '' if it can have them."""
    if decoder.shard.world > 1:
        return "the megakernel runs models on one GPU"
    properties = torch.cuda.get_device_properties(decoder.device)
    reason = unsupported(decoder.config, decoder.dtype, (properties.major, properties.minor))
    if reason or decoder.weight_bytes * COPY_SHARE <= properties.total_memory:
        return reason
    return f"its second copy of the weights would take more than 1/{COPY_SHARE} of the GPU's memory"


def _pack(decoder: CudaDecoder) -> PackedWeights:
    held, device = decoder.weights, decoder.device
    # Under MPS this is the number of SMs that this process may use at once: all blocks must be resident.
    grid = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    packed = PackedWeights(decoder.config, vocab_size=decoder.vocab_size, grid=grid, device=device)
    for index, layer in enumerate(held.layers):
        packed.put_layer(
            index,
            input_norm=layer.input_norm,
            mlp_norm=layer.mlp_norm,
            qk_norm=layer.qk_norm,
            matrices=layer.matrices,
            biases=layer.biases,
        )
    packed.put_ends(held.embedding, held.norm, held.head)
    return packed
