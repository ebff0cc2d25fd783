"""CITER's confidence head (arXiv 2502.01976): hidden state in, the probability that the small model's token will do out.

With h the LM head's input: y = BatchNorm(W_0 h + b_0), s = sigmoid(w (W_4 relu(y) + b_4) + b). The normalisation runs on its
stored statistics, so that it is one more linear map; it is folded into W_0, and w into W_4, in float64.

File: a bare state dict that torch.save wrote, H the hidden size: mlp.0 [2H, H], mlp.1 (BatchNorm over 2H), mlp.4 [H, 2H],
linear [1, H], all with biases.
"""

from __future__ import annotations

from pathlib import Path

import torch

from algorithms.base import RouteContext
from algorithms.checkpoint import Tensors, load_mapping
from algorithms.head_threshold import probability
from models.linear import RowPlan, linear, plan_rows

_EPS = 1e-5
_UNUSED = ("mlp.1.num_batches_tracked",)


class ConfidenceHead:
    """The folded head on a device, in float32.

    Args:
        wide: weight [N, H] and bias [N] of the map before the rectifier.
        out: weight [N] and bias [] of the one behind it.
    """

    def __init__(self, wide: tuple[torch.Tensor, torch.Tensor], out: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._wide, self._wide_bias = wide
        self._out, self._out_bias = out
        self._plan: RowPlan | None = None
        if self._wide.device.type == "cpu":
            self._plan = plan_rows([self._wide])

    @classmethod
    def load(cls, path: Path, key: str, context: RouteContext) -> ConfidenceHead:
        """Read a file for a model. Raises AlgorithmError naming file and tensor.

        Args:
            path: the file.
            key: the parameter that names it.
            context: of the side that the head is for.
        """
        state = load_mapping(path, key)
        tensors = Tensors(path, key, state)
        hidden = tensors.columns("linear.weight")
        if hidden != context.hidden_size:
            model = context.models[context.side]
            raise tensors.error(f"linear.weight: hidden size {hidden}, but model '{model}' has {context.hidden_size}")
        wide = 2 * hidden
        scale = tensors.take("mlp.1.weight", wide) / (tensors.take("mlp.1.running_var", wide) + _EPS).sqrt()
        shift = tensors.take("mlp.1.bias", wide) - scale * tensors.take("mlp.1.running_mean", wide)
        weight = scale[:, None] * tensors.take("mlp.0.weight", wide, hidden)
        bias = scale * tensors.take("mlp.0.bias", wide) + shift
        narrow, narrow_bias = tensors.take("mlp.4.weight", hidden, wide), tensors.take("mlp.4.bias", hidden)
        last, last_bias = tensors.take("linear.weight", 1, hidden)[0], tensors.take("linear.bias", 1)[0]
        tensors.finish(ignored=_UNUSED)
        parts = weight, bias, last @ narrow, last @ narrow_bias + last_bias
        weight, bias, out, out_bias = (part.to(context.device, torch.float32) for part in parts)
        return cls((weight, bias), (out, out_bias))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R] float32 confidence in (0, 1) of rows of [R, H] hidden states."""
        # Sums of rows, and on a CPU products with planned row counts: a row's bits do not depend on the others.
        wide = self._linear(hidden.float()).relu_()
        return probability((wide * self._out).sum(dim=-1) + self._out_bias)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        if self._plan is None:
            return torch.nn.functional.linear(x, self._wide, self._wide_bias)
        count = len(x)
        padded = torch.nn.functional.pad(x, (0, 0, 0, self._plan.padded(count) - count))
        return linear(padded, self._wide, self._plan, self._wide_bias)[:count]
