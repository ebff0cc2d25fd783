"""The CUDA decoder's weights: fused matrices, filled tensor by tensor straight on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """[outputs, inputs] each; one that lies elsewhere, packed, is absent."""
    biases: dict[MatrixKind, torch.Tensor]
    """[outputs], where the model has them. A row-parallel product's bias is on rank 0 alone."""


LayerSink = Callable[[int, LayerWeights], None]
"""Is told of each layer when it has been read, before the next one takes memory; may take matrices out of it."""


@dataclass(slots=True)
class DecoderWeights:
    """Everything that a rank reads in a step besides K and V."""

    embedding: torch.Tensor
    """[vocabulary or more, H]"""
    norm: torch.Tensor
    head: torch.Tensor
    """[n, H] this rank's block of the LM head, ids from rank * n on; rows past the vocabulary are padding."""
    layers: list[LayerWeights]

    def bytes(self) -> int:
        """Memory that the tensors take, shared ones counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._tensors()
        }
        return sum(storages.values())

    def matrix_shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of this rank's products in a step, those of packed matrices left out."""
        first = self.layers[0].matrices.values() if self.layers else ()
        return [(matrix.shape[0], matrix.shape[1]) for matrix in (*first, self.head)]

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
    finish_layer: LayerSink | None = None,
) -> DecoderWeights:
    """Read this shard's part of a model; besides the result, one tensor at a time takes memory. Raises ModelError.

    Args:
        source: of the tensors.
        config: the model's shape, which `shard` divides.
        shard: which part.
        dtype: of the weights.
        device: where they go.
        vocab_size: rows of the LM head to keep: the tokenizer's ids without padding rows.
        finish_layer: gets each layer.
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
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(f"model.layers.{index}."))
        if finish_layer is not None:
            finish_layer(index, layers[-1])
    return DecoderWeights(embedding, loader.vector("model.norm.weight"), head, layers)


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

    def layer(self, prefix: str) -> LayerWeights:
        config, attention, mlp = self._config, f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}{name}_proj": size for name, size in self._qkv_sizes().items()}
        gate_up = {f"{mlp}{name}_proj": config.intermediate_size for name in ("gate", "up")}
        matrices: dict[MatrixKind, torch.Tensor] = {
            "qkv": self._fused(qkv, ".weight", config.hidden_size),
            "o": self._columns(f"{attention}o_proj.weight", config.hidden_size, config.q_size),
            "gate_up": self._fused(gate_up, ".weight", config.hidden_size),
            "down": self._columns(f"{mlp}down_proj.weight", config.hidden_size, config.intermediate_size),
        }
        biases: dict[MatrixKind, torch.Tensor] = {}
        if config.qkv_bias:
            biases["qkv"] = self._fused(qkv, ".bias")
        if config.mlp_bias:
            biases["gate_up"] = self._fused(gate_up, ".bias")
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

    def _fused(self, sizes: dict[str, int], suffix: str, *columns: int) -> torch.Tensor:
        """This shard's rows of several tensors, one after the other."""
        parts = {name + suffix: self._shard.part(size) for name, size in sizes.items()}
        fused = self.zeros(sum(part.stop - part.start for part in parts.values()), *columns)
        place = 0
        for name, part in parts.items():
            self.fill(fused[place:], name, part)
            place += part.stop - part.start
        return fused

    def _columns(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """This shard's columns of a matrix."""
        part = self._shard.part(columns)
        matrix = self.zeros(rows, part.stop - part.start)
        self.fill(matrix, name, slice(None), part)
        return matrix
