"""A trained router's network in a few kernels that read its weights once, for the rows of a decode step."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from models.cuda.kernels.overlap import can_overlap

MOST_ROWS = 16
"""Rows up to which its kernels are faster than torch's, and which they have room for. R2R's router took an H200 159 us instead of
194 with 16 rows; with 24, 32 and 64, in several rounds of 16, it took 259, 270 and 491 instead of 202, 211 and 247."""
_LEAST_WIDTH, _MOST_WIDTH, _MOST_WIDE = 128, 1024, 4096
_INPUT_BLOCK = 512
_MOST_TOP = 200
_DTYPE = torch.bfloat16
"""Programs hold as many weights as fit in this type."""

Affine = tuple[torch.Tensor, torch.Tensor]
"""Weight [out, in] (or [width] of a norm) and bias."""


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """x + W_2 gelu(W_1 LayerNorm(x) + b_1) + b_2, of one width."""

    norm: Affine
    widen: Affine
    narrow: Affine


@dataclass(frozen=True, slots=True)
class RouterInputs:
    """Sizes of a router's inputs."""

    hidden: int
    embedding: int
    top: int
    """How many of the largest logits."""


class RouterHead:
    """The network, in bfloat16; see `make_head`."""

    def __init__(
        self, combined: Affine, blocks: Sequence[HeadBlock], out_norm: Affine, out: Affine, top: int, eps: float
    ) -> None:
        from models.cuda.kernels.top_values import slots_of

        weight, self._combined_bias = combined
        # Weights of zero for the columns past the wanted logits, and rows that begin at multiples of 16 bytes.
        self._combined = torch.nn.functional.pad(weight, (0, slots_of(top) - top))
        self._blocks = [(torch.stack(block.norm), block.widen, block.narrow) for block in blocks]
        self._out_norm = torch.stack(out_norm)
        self._out = out
        self._top = top
        self._eps = eps
        self._overlap = can_overlap(weight.device)

    def __call__(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        embedding: torch.Tensor,
        logits: torch.Tensor,
        thresholds: torch.Tensor,
        calibrated: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] float32 probabilities of divergence, and [R] int64: 1 where they reach the threshold.

        Args:
            hidden: [R, H] the LM head's input, R <= MOST_ROWS.
            tokens: [R] the sampled tokens.
            embedding: [rows, E] of the model.
            logits: [R, V] float32, raw.
            thresholds: [R] float32.
            calibrated: what those below 0 mean.
        """
        from models.cuda.kernels.router_layers import combine, judge, narrow_add, norm_widen
        from models.cuda.kernels.top_values import top_values

        overlap = self._overlap
        # The first kernel starts when all before it have ended, so that the others find their inputs whenever they start.
        top = top_values(logits, self._top, overlap=overlap)
        x = combine(hidden, tokens, embedding, top, self._combined, self._combined_bias, overlap=overlap)
        wide = x.new_empty((len(x), len(self._blocks[0][1][0]))) if self._blocks else x
        for norm, widen, narrow in self._blocks:
            norm_widen(x, norm, *widen, wide, self._eps, overlap=overlap)
            narrow_add(wide, *narrow, x, overlap=overlap)
        return judge(x, self._out_norm, *self._out, thresholds, self._eps, calibrated, overlap=overlap)


def make_head(
    combined: Affine, blocks: Sequence[HeadBlock], out_norm: Affine, out: Affine, inputs: RouterInputs, eps: float
) -> RouterHead | None:
    """The network where its kernels run on the tensors' device and take their shapes and type, else None.

    Args:
        combined: maps [hidden; embedding; top logits] to the first x.
        blocks: in their order.
        out_norm, out: the LayerNorm and the map to one logit at the end.
        inputs: their sizes.
        eps: of the norms.
    """
    width = len(combined[0])
    fits = (
        combined[0].dtype == _DTYPE
        and _runs_on(combined[0].device)
        and inputs.hidden % _INPUT_BLOCK == inputs.embedding % _INPUT_BLOCK == 0
        and inputs.top <= _MOST_TOP
        and _is_power(width, _LEAST_WIDTH, _MOST_WIDTH)
        and len({len(block.widen[0]) for block in blocks}) == 1
        and all(_is_power(len(block.widen[0]), _LEAST_WIDTH, _MOST_WIDE) for block in blocks)
        and all(len(block.narrow[0]) == width for block in blocks)
    )
    return RouterHead(combined, blocks, out_norm, out, inputs.top, eps) if fits else None


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[R, count] the largest of [R, V] float32 logits in each row, falling."""
    if count <= _MOST_TOP and _runs_on(logits.device) and logits.stride(-1) == 1 and has_values(logits):
        from models.cuda.kernels.top_values import top_values

        return top_values(logits, count)[:, :count]
    return logits.topk(count, dim=-1).values


def has_values(tensor: torch.Tensor) -> bool:
    """False for one that has a shape only, as an algorithm is tried with: a kernel would read from nowhere."""
    return not isinstance(tensor, FakeTensor)


def _is_power(number: int, least: int, most: int) -> bool:
    return least <= number <= most and number & (number - 1) == 0


def _runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels do; on a CPU they do while it interprets them."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
