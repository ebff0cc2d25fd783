"""Co-LLM's deferral head (arXiv 2403.03870): one more row of the small model's LM head, whose logit says "let the other write".

With h the LM head's input: P = sigmoid(w h + b). The row comes with a model that was fine-tuned for it (its tokenizer's last
token is <|defer|>; see `models.defer`), or from a safetensors file with defer.weight [1, H] and, if there is one, defer.bias [1].
"""

from __future__ import annotations

from pathlib import Path

import torch

from algorithms.base import RouteContext
from algorithms.checkpoint import Tensors, load_safetensors
from algorithms.head_threshold import probability


class DeferHead:
    """The row, in float32.

    Args:
        weight: [H]
        bias: [] or none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.float()
        self._bias = torch.zeros_like(self._weight[0]) if bias is None else bias.float()

    @classmethod
    def load(cls, path: Path, key: str, context: RouteContext) -> DeferHead:
        """Read a safetensors file for a model. Raises AlgorithmError naming file and tensor.

        Args:
            path: the file.
            key: the parameter that names it.
            context: of the side that the head is for.
        """
        tensors = Tensors(path, key, load_safetensors(path, key))
        weight = tensors.take("defer.weight", 1, context.hidden_size)[0].to(context.device)
        bias = tensors.take("defer.bias", 1)[0].to(context.device) if tensors.has("defer.bias") else None
        tensors.finish()
        return cls(weight, bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R] float32 probability of deferring, of rows of [R, H] hidden states; a row's bits do not depend on the others."""
        return probability((hidden.float() * self._weight).sum(dim=-1) + self._bias)
