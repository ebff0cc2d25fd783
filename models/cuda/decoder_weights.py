"""The CUDA decoder's weights: fused matrices, filled tensor by tensor straight on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from models.config import ModelConfig
from models.cuda.shard import Shard

MatrixKind = Literal["qkv", "o", "gate_up", "down"]
MATRICES: tuple[MatrixKind, ...] = ("qkv", "o", "gate_up", "down")
_HEAD_BLOCK = 64
"""Rows of the LM head are padded to a multiple of this: rows of logits stay aligned whatever the vocabulary."""


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or random numbers."""

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor of `expected_tensors`, in any floating dtype and on any device. Raises ModelError."""
        ...


@dataclass(slots=True)
class LayerWeights:
    """One layer's share."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qk_norm: torch.Tensor | None
    """[2, head_dim] weights of q's and k's norm."""
    matrices: dict[MatrixKind, torch.Tensor]
    """[outputs, inputs] each, of `DecoderWeights.stacks`."""
    biases: dict[MatrixKind, torch.Tensor]
    """[outputs], where the model has them. A row-parallel product's bias is on rank 0 alone."""


@dataclass(slots=True)
class DecoderWeights:
    """Everything that a rank reads in a step besides K and V."""

    embedding: torch.Tensor
    """[vocabulary or more, H]"""
    norm: torch.Tensor
    head: torch.Tensor
    """[n, H] this rank's block of the LM head, ids from rank * n on; rows past the vocabulary are padding."""
    layers: list[LayerWeights]
    stacks: dict[MatrixKind, torch.Tensor]
    """[layers, outputs, inputs], contiguous: the layers' matrices, one behind the other."""

    def bytes(self) -> int:
        """Memory that the tensors take, shared ones counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._tensors()
        }
        return sum(storages.values())

    def matrix_shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of this rank's products in a step."""
        return [(matrix.shape[-2], matrix.shape[-1]) for matrix in (*self.stacks.values(), self.head)]

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.embedding, self.norm, self.head)
        for layer in self.layers:
            yield from (layer.input_norm, layer.mlp_norm, *layer.matrices.values(), *layer.biases.values())
            if layer.qk_norm is not None:
                yield layer.qk_norm


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
) -> DecoderWeights:
    """Read this shard's part of a model; besides the result, one tensor at a time takes memory. Raises ModelError.

    Args:
        source: of the tensors.
        config: the model's shape, which `shard` divides.
        shard: which part.
        dtype: of the weights.
        device: where they go.
        vocab_size: rows of the LM head to keep: the tokenizer's ids without padding rows.
    """
    loader = _Loader(source, config, shard, dtype, device)
    head_rows = -(-vocab_size // (shard.world * _HEAD_BLOCK)) * _HEAD_BLOCK
    embedding = loader.zeros(max(config.vocab_size, head_rows * shard.world), config.hidden_size)
    loader.fill(embedding, "model.embed_tokens.weight", slice(0, config.vocab_size))
    block = slice(shard.rank * head_rows, (shard.rank + 1) * head_rows)
    if config.tied:
        head = embedding[block]
    else:
        head = loader.zeros(head_rows, config.hidden_size)
        loader.fill(head, "lm_head.weight", slice(min(block.start, vocab_size), min(block.stop, vocab_size)))
    stacks = loader.stacks()
    layers = [
        loader.layer(f"model.layers.{index}.", {kind: stack[index] for kind, stack in stacks.items()})
        for index in range(config.num_layers)
    ]
    return DecoderWeights(embedding, loader.vector("model.norm.weight"), head, layers, stacks)


class _Loader:
    def __init__(
        self, source: TensorSource, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._config = config
        self._shard = shard
        self._dtype = dtype
        self._device = device

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def fill(self, target: torch.Tensor, name: str, *index: slice) -> None:
        """Copy a part of a tensor to the first rows of `target`."""
        part = self._source.part(name, index)
        target[: len(part)].copy_(part)

    def vector(self, name: str) -> torch.Tensor:
        """A whole vector."""
        return self._source.part(name, (slice(None),)).to(device=self._device, dtype=self._dtype, copy=True)

    def stacks(self) -> dict[MatrixKind, torch.Tensor]:
        """Room for the matrices of all layers."""
        config, world = self._config, self._shard.world
        hidden, ffn = config.hidden_size, config.intermediate_size // world
        sizes: dict[MatrixKind, tuple[int, int]] = {
            "qkv": (sum(self._qkv_sizes().values()) // world, hidden),
            "o": (hidden, config.q_size // world),
            "gate_up": (2 * ffn, hidden),
            "down": (hidden, ffn),
        }
        return {kind: self.zeros(config.num_layers, *size) for kind, size in sizes.items()}

    def layer(self, prefix: str, matrices: dict[MatrixKind, torch.Tensor]) -> LayerWeights:
        """Read a layer, its matrices [outputs, inputs] into the given ones."""
        config, attention, mlp = self._config, f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}{name}_proj": size for name, size in self._qkv_sizes().items()}
        gate_up = {f"{mlp}{name}_proj": config.intermediate_size for name in ("gate", "up")}
        self._fuse(matrices["qkv"], qkv, ".weight")
        self._columns(matrices["o"], f"{attention}o_proj.weight", config.q_size)
        self._fuse(matrices["gate_up"], gate_up, ".weight")
        self._columns(matrices["down"], f"{mlp}down_proj.weight", config.intermediate_size)
        biases: dict[MatrixKind, torch.Tensor] = {}
        if config.qkv_bias:
            biases["qkv"] = self._fuse(self.zeros(len(matrices["qkv"])), qkv, ".bias")
        if config.mlp_bias:
            biases["gate_up"] = self._fuse(self.zeros(len(matrices["gate_up"])), gate_up, ".bias")
        if config.o_bias and self._shard.rank == 0:
            biases["o"] = self.vector(f"{attention}o_proj.bias")
        if config.mlp_bias and self._shard.rank == 0:
            biases["down"] = self.vector(f"{mlp}down_proj.bias")
        return LayerWeights(
            input_norm=self.vector(f"{prefix}input_layernorm.weight"),
            mlp_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            matrices=matrices,
            biases=biases,
        )

    def _qkv_sizes(self) -> dict[str, int]:
        return {"q": self._config.q_size, "k": self._config.kv_size, "v": self._config.kv_size}

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        return torch.stack([self.vector(f"{prefix}{name}_norm.weight") for name in "qk"])

    def _fuse(self, target: torch.Tensor, sizes: dict[str, int], suffix: str) -> torch.Tensor:
        """Fill with this shard's rows of several tensors, one after the other."""
        place = 0
        for name, size in sizes.items():
            part = self._shard.part(size)
            self.fill(target[place:], name + suffix, part)
            place += part.stop - part.start
        return target

    def _columns(self, target: torch.Tensor, name: str, columns: int) -> None:
        """Fill with this shard's columns of a matrix."""
        self.fill(target, name, slice(None), self._shard.part(columns))
