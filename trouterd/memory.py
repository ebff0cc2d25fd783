"""How the memory of a GPU is divided between the models on it: plain arithmetic for the supervisor and the workers, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from models.shape import weight_bytes
from trouterd.config import Model

GIB = 1 << 30
_SLACK_SHIFT = 8
"""1/256 of a GPU stays free: allocators round up, and pools of different sizes leave gaps."""
KV_TOKENS = "kv-tokens"
"""Verb, worker -> supervisor: how many tokens may my KV pool have? Args: `claim`. Answered when all have asked."""
GPU_MEMORY = "gpu-memory"
"""Verb, supervisor -> worker: `Memory` by index of each of your GPUs."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes on each of its GPUs, measured, in bytes."""

    weights: int
    """Held when it is reported, and from then on."""
    graphs: int
    """Private memory of captured graphs."""
    workspace: int
    """The most that a step holds at once beside weights, graphs and KV."""
    kv_bytes_per_token: int

    @property
    def fixed(self) -> int:
        """Everything but KV."""
        return self.weights + self.graphs + self.workspace


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A model's part in dividing its GPUs."""

    footprint: Footprint
    page_size: int
    """Tokens; a pool is whole pages."""
    context: int
    """Tokens of one full context: less than that is no use."""
    most: int
    """Tokens that could ever be used at once."""
    fixed_tokens: int = 0
    """models.X.kv_tokens: this many and no other number; 0 = as many as fit."""

    @property
    def least(self) -> int:
        """Tokens of the whole pages of one context."""
        return -(-self.context // self.page_size) * self.page_size

    def tokens(self, common: int) -> int:
        """Tokens of this model's pool when `common` is what all models of its GPUs can have."""
        return self.fixed_tokens or min(common, max(self.most, self.least))


class Memory(msgspec.Struct, frozen=True):
    """One GPU, bytes."""

    total: int
    free: int
    """At a moment when every model on it has loaded its weights and holds nothing else."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU to be divided: whose models are on it, and how much of it they may take."""

    index: int
    memory: Memory
    fraction: float
    claims: Mapping[str, Claim]

    @property
    def budget(self) -> int:
        """Bytes that its models may take together."""
        return int(self.memory.total * self.fraction)

    @property
    def reach(self) -> int:
        """Bytes that its models could take at most: what they hold and what nobody holds, less what rounding may cost."""
        held = sum(claim.footprint.weights for claim in self.claims.values())
        return self.memory.free + held - (self.memory.total >> _SLACK_SHIFT)

    @property
    def fixed(self) -> int:
        """Bytes of everything but KV."""
        return sum(claim.footprint.fixed for claim in self.claims.values())

    @property
    def room(self) -> int:
        """Bytes for KV; negative when not even the rest fits."""
        return min(self.budget, self.reach) - self.fixed

    def kv_bytes(self, common: int) -> int:
        """Bytes of all pools when `common` is the common number of tokens."""
        return sum(claim.tokens(common) * claim.footprint.kv_bytes_per_token for claim in self.claims.values())


class FitError(Exception):
    """The models of a GPU do not fit; the one-line message says what would."""


def common_tokens(cards: Iterable[Card]) -> int:
    """The largest number of KV tokens that every model on these GPUs can have, unless it wants a number of its own or less.

    Raises:
        FitError: not even one context of each fits.
    """
    found = min(_largest(card) for card in cards)
    for card in cards:
        for name, claim in card.claims.items():
            if not claim.fixed_tokens and claim.tokens(found) < claim.least:
                raise FitError(
                    f"models.{name}.context_length: one context of {claim.context} tokens does not fit: GPU {card.index}"
                    f" has room for {found} KV tokens of each of its models; lower it{_raise_fraction(card)}."
                    f" {_account(card)}"
                )
    return found


def _largest(card: Card) -> int:
    """The largest common number of tokens on one GPU, 0 or more."""
    if card.room < 0:
        raise FitError(
            f"gpu.memory_fraction: {', '.join(card.claims)} need {card.fixed / card.memory.total:.3f} of GPU {card.index}"
            f" without any KV{_raise_fraction(card)}. {_account(card)}"
        )
    for name, claim in card.claims.items():
        wanted = claim.fixed_tokens * claim.footprint.kv_bytes_per_token
        others = card.kv_bytes(0) - wanted
        if wanted > card.room - others:
            fits = max(card.room - others, 0) // claim.footprint.kv_bytes_per_token
            raise FitError(
                f"models.{name}.kv_tokens: {claim.fixed_tokens} tokens take {gib(wanted)} of GPU {card.index}; at most"
                f" {fits // claim.page_size * claim.page_size} fit{_raise_fraction(card)}. {_account(card)}"
            )
    low, high = 0, max(claim.tokens(1 << 62) for claim in card.claims.values())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if card.kv_bytes(middle) <= card.room else (low, middle - 1)
    return low


def _raise_fraction(card: Card) -> str:
    """What a larger gpu.memory_fraction can do about it."""
    largest = int(card.reach / card.memory.total * 1000) / 1000
    if largest > card.fraction:
        return f", or raise gpu.memory_fraction: {largest:g} is the largest that fits there"
    return f"; {largest:g} is the largest gpu.memory_fraction that fits there, the rest is taken by others"


def _account(card: Card) -> str:
    """Who takes what."""
    models = "; ".join(
        f"{name}: weights {gib(f.weights)}, graphs {gib(f.graphs)}, workspace {gib(f.workspace)},"
        f" KV {f.kv_bytes_per_token} bytes a token"
        for name, f in ((name, claim.footprint) for name, claim in card.claims.items())
    )
    allowed = f"{card.fraction:g} of {gib(card.memory.total)}"
    return f"({allowed}, {gib(card.memory.free)} free; {models})"


def gib(count: int) -> str:
    """Bytes in words."""
    return f"{count / GIB:.2f} GiB"


def weights_per_gpu(model: Model) -> int:
    """Bytes of a model's weights on each of its GPUs, before they are loaded."""
    return weight_bytes(Path(model.path), model.element_bytes) // model.tensor_parallel
