"""A decoder's share of a model that several devices hold together (tensor parallelism, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from models.config import ModelConfig, ModelError


class FusedSums(Protocol):
    """Sums over ranks in one kernel with the norm that follows them."""

    def parts(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two places [rows, H] for this rank's part of a product: one sum takes the first, the next one the second, and so on."""
        ...

    def add_norm(
        self,
        part: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        *,
        overlap: bool,
    ) -> None:
        """x [T, H] += the sum over ranks of the first T rows of `part`; out [T, H] = norm(x) * weight.

        With `overlap` it may start while the kernel ahead ends, which must not write `x` or `weight`.
        """
        ...


def _keep(_partial: torch.Tensor) -> None:
    """The sum over one rank."""


def _same(local: torch.Tensor) -> torch.Tensor:
    """What one rank gathers."""
    return local


def _unfused(_rows: int) -> FusedSums | None:
    """One rank sums nothing."""
    return None


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world` ranks: heads and intermediate columns are dealt out evenly, ids in blocks.

    The query, key, value, gate and up products are column-parallel, those after attention and activation row-parallel;
    the embedding is on every rank, the LM head's rows are dealt out.
    """

    rank: int = 0
    world: int = 1
    all_reduce: Callable[[torch.Tensor], None] = _keep
    """[T, H]: replaced by its sum over all ranks, on the current stream."""
    all_gather: Callable[[torch.Tensor], torch.Tensor] = _same
    """[R, n] of this rank -> [R, world * n] on rank 0, ranks in rising order; what the others get is of no use."""
    fused: Callable[[int], FusedSums | None] = _unfused
    """For steps of so many rows; None: `all_reduce` and a norm."""

    def check(self, config: ModelConfig, source: str) -> None:
        """Raise ModelError, naming the field of `source`'s config.json, where the model cannot be dealt out evenly."""
        if not 0 <= self.rank < self.world:
            raise ModelError(f"{source}: rank {self.rank} is not one of {self.world} ranks")
        for field, count in (
            ("num_attention_heads", config.num_heads),
            ("num_key_value_heads", config.num_kv_heads),
            ("intermediate_size", config.intermediate_size),
        ):
            if count % self.world:
                raise ModelError(f"{source}: {field}: {count} cannot be dealt out to {self.world} devices evenly")

    def part(self, count: int) -> slice:
        """This rank's share of `count` things that divide evenly."""
        share = count // self.world
        return slice(self.rank * share, (self.rank + 1) * share)
