"""Gives the plain matrices of a model whose weights are kept packed only."""

from __future__ import annotations

import torch

from models.cuda.packed_weights import MatrixKind, PackedWeights


class Unpacker:
    """Writes one matrix at a time to a workspace, on the current stream.

    A matrix is valid until the next one is asked for: whatever reads it has to be enqueued on the same stream before that.
    Calls can be captured in a CUDA graph.
    """

    def __init__(self, weights: PackedWeights) -> None:
        self._weights = weights
        size = max(layout.outputs * layout.inputs for layout in weights.layouts.values())
        self._workspace = torch.empty(size, dtype=torch.bfloat16, device=weights.device)
        for layout in weights.layouts.values():
            layout.unit_table(weights.device)  # now: a copy from the host cannot be captured

    def __call__(self, layer: int, kind: MatrixKind) -> torch.Tensor:
        """[outputs, inputs] of one of a layer's matrices."""
        from models.cuda.kernels.unpack import unpack

        layout = self._weights.layouts[kind]
        matrix = self._workspace[: layout.outputs * layout.inputs].view(layout.outputs, layout.inputs)
        unpack(layout, self._weights.matrix(layer, kind), matrix)
        return matrix

    def bytes(self) -> int:
        """Memory of the workspace."""
        return self._workspace.nbytes
