"""Gives a CUDA decoder the megakernel as the way of its small steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.config import ModelConfig
from models.cuda.decoder_weights import LayerWeights
from models.cuda.megakernel import MAX_ROWS, Launcher, Megakernel, fits_twice, served_rows, unsupported
from models.cuda.nvcc import find_nvcc
from models.cuda.packed_weights import KINDS, PackedWeights
from models.cuda.unpacker import Unpacker

if TYPE_CHECKING:
    from models.cuda.decoder import CudaDecoder


class Packer:
    """Packs layers while a decoder is being loaded: its `layer` is the decoder's `finish_layer`.

    Args:
        config: the model's shape; `obstacle` says whether it can be packed.
        vocab_size: rows of the LM head to keep.
        device: where everything lies.
        share: part of the SMs that the kernel takes; the others stay free for another model.
        alone: take a layer's plain matrices away when it is packed, so that one layer at a time exists twice. None does so
            where a copy of all of them would be too large for the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        device: torch.device,
        share: float = 1.0,
        alone: bool | None = None,
    ) -> None:
        self.alone = _is_large(config, device) if alone is None else alone
        self.share = share
        # Under MPS this is the number of SMs that this process may use at once: all blocks must be resident.
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        grid = max(1, int(share * processors))
        self.weights = PackedWeights(config, vocab_size=vocab_size, grid=grid, device=device)

    def layer(self, index: int, layer: LayerWeights) -> None:
        """Pack a layer that has just been read."""
        for kind in KINDS:
            self.weights.put_matrix(index, kind, layer.matrices[kind])
            if self.alone:
                del layer.matrices[kind]
        self.weights.put_vectors(
            index,
            input_norm=layer.input_norm,
            mlp_norm=layer.mlp_norm,
            qk_norm=layer.qk_norm,
            biases=layer.biases,
        )


class FastSteps:
    """A decoder's packed weights, and the kernel over them for each KV pool that the decoder gets.

    Args:
        decoder: was loaded with the packer's `layer`.
        packer: has its layers; the embedding and the LM head follow here, and stay in the decoder as well.
        launcher: how the kernel is started; None compiles it for the GPU.
    """

    def __init__(self, decoder: CudaDecoder, packer: Packer, launcher: Launcher | None = None) -> None:
        self._decoder = decoder
        self._launcher = launcher
        # Beyond these rows products of plain matrices are faster, unless each has to be unpacked first.
        self._most_rows = MAX_ROWS if packer.alone else served_rows(packer.share)
        self.weights = packer.weights
        held = decoder.weights
        self.weights.put_ends(held.embedding, held.norm, held.head)
        decoder.packed_bytes = self.weights.bytes()
        if packer.alone:
            unpacker = Unpacker(self.weights)
            decoder.unpack = unpacker
            decoder.packed_bytes += unpacker.bytes()

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


def _is_large(config: ModelConfig, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    size = config.parameters() * torch.bfloat16.itemsize
    return not fits_twice(size, torch.cuda.get_device_properties(device).total_memory)
