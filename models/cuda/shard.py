"""A decoder's share of a model that several devices hold together (tensor parallelism, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.config import ModelConfig, ModelError


def _keep(_partial: torch.Tensor) -> None:
    """The sum over one rank."""


def _same(local: torch.Tensor) -> torch.Tensor:
    """What one rank gathers."""
    return local


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
    """[R, n] of this rank -> [R, world * n], ranks in rising order."""

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
