"""Whether matrix products are right on this device, as this process may use it.

Under MPS with a part of the multiprocessors cuBLAS has been seen to leave tiles of bfloat16 products unwritten (cuBLAS 13.0 on
an H200: 104 of 132, in almost every shape; none on 66 and on all), without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from models.config import ModelConfig, ModelError

_TOLERANCE = 4.0
"""Of a row's sum, in root mean squares of its elements: rounding makes less than one, a missing or doubled tile far more."""


def shapes_of(config: ModelConfig, vocab_size: int) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of a model's matrices."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    return (
        (config.q_size + 2 * config.kv_size, hidden),
        (hidden, config.q_size),
        (2 * ffn, hidden),
        (hidden, ffn),
        (vocab_size, hidden),
    )


def check_products(
    device: torch.device, dtype: torch.dtype, percent: int, shapes: Iterable[tuple[int, int]], rows: Sequence[int]
) -> None:
    """Try the products where MPS limits this process; arguments as of `wrong_product`.

    Args:
        percent: of the multiprocessors, to which it is limited; 0: it is not, and nothing is tried.

    Raises:
        ModelError: they come out wrong.
    """
    if percent and (wrong := wrong_product(device, dtype, shapes, rows)):
        raise ModelError(
            f"sm_percent: on {percent} % of the multiprocessors of {device} its matrix library gives wrong products ({wrong});"
            " take another value, such as 50, or leave it out"
        )


def wrong_product(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, int]], rows: Sequence[int]
) -> str:
    """The first product that comes out wrong, as "rows x inputs by inputs x outputs"; '' if all are right.

    Args:
        device: where.
        dtype: of the factors.
        shapes: (outputs, inputs) of the right factors.
        rows: of the left ones.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(height: int, width: int) -> torch.Tensor:
        return torch.empty(height, width, dtype=dtype, device=device).normal_(generator=generator)

    for outputs, inputs in shapes:
        weight = random(outputs, inputs)
        sums = weight.sum(dim=0, dtype=torch.float32)
        for count in rows:
            x = random(count, inputs)
            # What no program writes stays NaN.
            product = torch.full((count, outputs), float("nan"), dtype=dtype, device=device)
            torch.mm(x, weight.t(), out=product)
            error = product.sum(dim=1, dtype=torch.float32) - (x.float() * sums).sum(dim=1)
            size = product.float().square().mean(dim=1).sqrt()
            if not bool((error.abs() <= _TOLERANCE * size).all()):
                return f"{count} x {inputs} by {inputs} x {outputs}"
    return ""
