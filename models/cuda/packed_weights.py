"""A model's weights as the megakernel reads them: one stream of packed matrices, and its small vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from models.config import ModelConfig
from models.cuda.packing import BLOCK, UNIT, Layout

MatrixKind = Literal["qkv", "o", "gate_up", "down"]
KINDS: tuple[MatrixKind, ...] = ("qkv", "o", "gate_up", "down")


class PackedWeights:
    """Filled layer by layer with `put_layer`, so that a layer's plain matrices can go before the next one is read.

    Args:
        config: the model's shape.
        vocab_size: rows of the LM head to keep.
        grid: SMs that the kernel runs on.
        device: where everything lies.
    """

    def __init__(self, config: ModelConfig, *, vocab_size: int, grid: int, device: torch.device) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.grid = grid
        self.device = device
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.layouts: dict[MatrixKind, Layout] = {
            "qkv": Layout(config.q_size + 2 * config.kv_size, hidden, grid),
            "o": Layout(hidden, config.q_size, grid),
            "gate_up": Layout(2 * ffn, hidden, grid, interleaved=True),
            "down": Layout(hidden, ffn, grid),
        }
        self.head_layout = Layout(vocab_size, hidden, grid)
        self.layer_elements = sum(layout.elements for layout in self.layouts.values())
        total = config.num_layers * self.layer_elements + self.head_layout.elements
        self.stream = torch.empty(total, dtype=torch.bfloat16, device=device)
        """Layer after layer, each in the order of `KINDS`, then the LM head."""
        self.vector_offsets = _vector_offsets(config, self.layouts)
        self.vector_stride = sum(size for _, size in self.vector_offsets.values())
        self.vectors = torch.zeros(config.num_layers, self.vector_stride, dtype=torch.bfloat16, device=device)
        """[layers, vector_stride] norms and biases; see `vector_offsets`: name -> (first element, elements)."""
        self.embedding = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        self.final_norm = torch.empty(0, dtype=torch.bfloat16, device=device)

    def offset(self, kind: MatrixKind) -> int:
        """First element of a matrix in its layer."""
        return sum(self.layouts[other].elements for other in KINDS[: KINDS.index(kind)])

    def put_layer(
        self,
        index: int,
        *,
        input_norm: torch.Tensor,
        mlp_norm: torch.Tensor,
        qk_norm: torch.Tensor | None,
        matrices: Mapping[MatrixKind, torch.Tensor],
        biases: Mapping[MatrixKind, torch.Tensor],
    ) -> None:
        """Pack one layer.

        Args:
            index: of the layer.
            input_norm: [H] weights of the norm before attention.
            mlp_norm: [H] of the one after it.
            qk_norm: [2, head_dim] of q's and k's, where the model has them.
            matrices: [outputs, inputs] each.
            biases: [outputs] of those that have one.
        """
        for kind in KINDS:
            self.put_matrix(index, kind, matrices[kind])
        self.put_vectors(index, input_norm=input_norm, mlp_norm=mlp_norm, qk_norm=qk_norm, biases=biases)

    def put_matrix(self, index: int, kind: MatrixKind, matrix: torch.Tensor) -> None:
        """Pack one matrix [outputs, inputs] of a layer."""
        self.layouts[kind].pack(matrix, self.matrix(index, kind))

    def put_vectors(
        self,
        index: int,
        *,
        input_norm: torch.Tensor,
        mlp_norm: torch.Tensor,
        qk_norm: torch.Tensor | None,
        biases: Mapping[MatrixKind, torch.Tensor],
    ) -> None:
        """A layer's norms and biases, as in `put_layer`."""
        vectors = {"input_norm": input_norm, "mlp_norm": mlp_norm}
        if qk_norm is not None:
            vectors |= {"q_norm": qk_norm[0], "k_norm": qk_norm[1]}
        vectors |= {f"{kind}_bias": bias for kind, bias in biases.items() if kind != "gate_up"}
        if "gate_up" in biases:
            vectors["gate_up_bias"] = biases["gate_up"].view(2, -1).t().flatten()
        for name, vector in vectors.items():
            first, size = self.vector_offsets[name]
            self.vectors[index, first : first + size] = vector

    def put_ends(self, embedding: torch.Tensor, final_norm: torch.Tensor, head: torch.Tensor) -> None:
        """The rest: the embedding [vocabulary or more, H] and the norm are kept as they are, the LM head is packed."""
        self.embedding = embedding
        self.final_norm = final_norm
        self.head_layout.pack(head[: self.vocab_size], self.stream[self.config.num_layers * self.layer_elements :])

    def unpack(self, index: int, kind: MatrixKind) -> torch.Tensor:
        """[outputs, inputs] one of a layer's matrices, as it was put in."""
        return self.layouts[kind].unpack(self.matrix(index, kind))

    def bytes(self) -> int:
        """Memory of what is packed, without the embedding."""
        return self.stream.nbytes + self.vectors.nbytes

    def matrix(self, index: int, kind: MatrixKind) -> torch.Tensor:
        """[elements] a matrix as it lies in the stream."""
        first = index * self.layer_elements + self.offset(kind)
        return self.stream[first : first + self.layouts[kind].elements]


def shape_problem(config: ModelConfig) -> str:
    """Why weights of this shape cannot be packed; empty if they can."""
    for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if size % BLOCK:
            return f"{name} {size} is not a multiple of {BLOCK}"
    return (
        ""
        if config.q_size % BLOCK == 0
        else f"the width of all query heads, {config.q_size}, is not a multiple of {BLOCK}"
    )


def _vector_offsets(config: ModelConfig, layouts: Mapping[MatrixKind, Layout]) -> dict[str, tuple[int, int]]:
    hidden = config.hidden_size
    sizes = {"input_norm": hidden, "mlp_norm": hidden}
    if config.qk_norm:
        sizes |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    sizes |= {f"{kind}_bias": layouts[kind].outputs for kind in KINDS if biased[kind]}
    offsets, first = {}, 0
    for name, size in sizes.items():
        offsets[name] = (first, size)
        first += -(-size // UNIT) * UNIT  # vectors are read 16 bytes at a time
    return offsets
