"""A model's weights as the megakernel reads them: the decoder's own matrices, and norms and biases side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from models.config import ModelConfig
from models.cuda.decoder_weights import MATRICES, DecoderWeights, LayerWeights, MatrixKind
from models.cuda.shares import BLOCK, UNIT, Shares
from models.cuda.tensor_map import Boxes, layer_units


class MegaWeights:
    """Where everything lies.

    Args:
        config: the model's shape.
        weights: of the whole model in bfloat16; matrices are read where they are. The LM head has a multiple of 8 rows.
        vocab_size: rows of the LM head that count.
        grid: SMs that the kernel runs on.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, vocab_size: int, grid: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.grid = grid
        self.device = weights.embedding.device
        self.embedding = weights.embedding
        self.final_norm = weights.norm
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.shares: dict[MatrixKind, Shares] = {
            "qkv": Shares(config.q_size + 2 * config.kv_size, hidden, grid),
            "o": Shares(hidden, config.q_size, grid),
            "gate_up": Shares(2 * ffn, hidden, grid, interleaved=True),
            "down": Shares(hidden, ffn, grid),
        }
        self.head_shares = Shares(vocab_size, hidden, grid)
        self._stacks = [*(weights.stacks[kind] for kind in MATRICES), weights.head[None]]
        self.vector_offsets = _vector_offsets(config, self.shares)
        self.vector_stride = sum(size for _, size in self.vector_offsets.values())
        self.vectors = torch.zeros(config.num_layers, self.vector_stride, dtype=torch.bfloat16, device=self.device)
        """[layers, vector_stride] norms and biases; see `vector_offsets`: name -> (first element, elements)."""
        for index, layer in enumerate(weights.layers):
            self._put_vectors(index, layer)

    def dealt(self) -> list[tuple[Shares, int, tuple[Boxes, ...]]]:
        """Of every kind of matrix, in order: how it is dealt out, units from layer to layer, chunks of each size of tile."""
        shares = [*(self.shares[kind] for kind in MATRICES), self.head_shares]
        return [
            (own, layer_units(stack, own), tuple(Boxes.of(stack, own, units) for units in own.tile_sizes()))
            for own, stack in zip(shares, self._stacks, strict=True)
        ]

    def _put_vectors(self, index: int, layer: LayerWeights) -> None:
        vectors = {"input_norm": layer.input_norm, "mlp_norm": layer.mlp_norm}
        if layer.qk_norm is not None:
            vectors |= {"q_norm": layer.qk_norm[0], "k_norm": layer.qk_norm[1]}
        vectors |= {f"{kind}_bias": bias for kind, bias in layer.biases.items() if kind != "gate_up"}
        if "gate_up" in layer.biases:
            vectors["gate_up_bias"] = layer.biases["gate_up"].view(2, -1).t().flatten()
        for name, vector in vectors.items():
            first, size = self.vector_offsets[name]
            self.vectors[index, first : first + size] = vector


def shape_problem(config: ModelConfig) -> str:
    """Why the kernel cannot read weights of this shape; empty if it can."""
    for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if size % BLOCK:
            return f"{name} {size} is not a multiple of {BLOCK}"
    return (
        ""
        if config.q_size % BLOCK == 0
        else f"the width of all query heads, {config.q_size}, is not a multiple of {BLOCK}"
    )


def _vector_offsets(config: ModelConfig, shares: Mapping[MatrixKind, Shares]) -> dict[str, tuple[int, int]]:
    hidden = config.hidden_size
    sizes = {"input_norm": hidden, "mlp_norm": hidden}
    if config.qk_norm:
        sizes |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    sizes |= {f"{kind}_bias": shares[kind].outputs for kind in MATRICES if biased[kind]}
    offsets, first = {}, 0
    for name, size in sizes.items():
        offsets[name] = (first, size)
        first += -(-size // UNIT) * UNIT  # vectors are read 16 bytes at a time
    return offsets
