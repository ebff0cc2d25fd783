"""What a step takes and gives: the one interface between the scheduler and every model runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
PageTable = npt.NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """T token rows of up to T requests; decode, extend and prefill are the same thing with different row counts.

    Rows of one slot are consecutive and in rising position order. K and V of all rows are written before attention
    reads, so that a row sees every earlier row of its own slot: exact causal attention.
    """

    tokens: IntArray
    """[T] token ids to feed."""
    positions: IntArray
    """[T] absolute position of each row (prompt + output), which is also its KV index."""
    slots: IntArray
    """[T] row of `page_table` that belongs to the request of each token row."""
    page_table: PageTable
    """[max_slots, max_pages] page numbers; entry j of a slot holds positions j * page_size ... (shared, not copied)."""
    logit_rows: IntArray
    """[R] indices into the T rows whose logits are wanted, rising."""
    output_index: IntArray
    """[R] output index (0 = first generated token) of the token that each of those logits predicts."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class StepOutput:
    """What a forward pass yields for the R wanted rows, in the order of `Batch.logit_rows`."""

    logits: torch.Tensor
    """[R, V] float32, raw: before temperature and any mask; V is the tokenizer's vocabulary, padding rows cut off."""
    hidden: torch.Tensor
    """[R, H] the LM head's input."""


class ModelRunner(Protocol):
    """Weights plus KV storage; knows no requests."""

    vocab_size: int
    hidden_size: int
    context_length: int
    page_size: int
    num_pages: int
    embedding: torch.Tensor | None
    """[rows >= vocab_size, E] the token embedding, for routing algorithms that look tokens up; None without weights."""

    @property
    def inline(self) -> bool:
        """True when a step is so short that handing it to another thread would cost more than it saves."""
        ...

    def step(self, batch: Batch) -> StepOutput:
        """Feed the rows, write their K and V, return logits and hidden states of the wanted rows."""
        ...
