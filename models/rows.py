"""Token rows that lie on a device, and the decoder that runs them: the part of a step that a CUDA graph captures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from models.batch import IntArray, StepOutput
from models.config import ModelConfig


@dataclass(slots=True)
class Rows:
    """T token rows on the decoder's device; the device-side twin of `Batch`, at addresses that stay the same from step to step.

    Rows of one slot are consecutive and in rising position order (a run). K and V of all rows are written before attention
    reads, so that a row sees every earlier row of its run.
    """

    tokens: torch.Tensor
    """[T] int32 token ids to feed."""
    positions: torch.Tensor
    """[T] int32 absolute position of each row, which is also its KV index. -1: the row is inactive (padding, or its request has
    left): it writes no KV, and what comes out of it is finite and means nothing."""
    slots: torch.Tensor
    """[T] int32 row of `page_table`."""
    leaders: torch.Tensor
    """[T] int32 index of the first row of each row's run."""
    counts: torch.Tensor
    """[T] int32 rows of the run at its first row, 0 at the others."""
    page_table: torch.Tensor
    """[max_slots, max_pages] int32 page numbers; entry j of a slot holds positions j * page_size ..."""
    logit_rows: torch.Tensor
    """[R] int32 indices into the T rows whose logits are wanted, rising; padding repeats an inactive row."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Runs:
    """What the host knows of a step's runs, for kernels that are planned on the host: only outside graphs."""

    firsts: IntArray
    """[G] first row of each run."""
    counts: IntArray
    """[G] rows of each run."""
    starts: IntArray
    """[G] position of each run's first row."""
    slots: IntArray
    """[G]"""


class RowDecoder(Protocol):
    """Weights plus KV storage on one device. Knows neither requests nor sampling."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    """Columns of the logits: the tokenizer's ids, padding rows of the LM head cut off."""
    context_length: int
    page_size: int
    num_pages: int
    embedding: torch.Tensor
    """[rows >= vocab_size, H] the token embedding, for routing algorithms that look tokens up."""

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        """Feed the rows, write K and V of the active ones, give logits and hidden states of `logit_rows`.

        Only enqueues work on the current stream: no host synchronisation, and none of the tensors' contents are read on the
        host, so that the call can be captured. With `runs` (never while capturing) kernels may be chosen and planned by it.
        """
        ...


@runtime_checkable
class Planner(Protocol):
    """A `RowDecoder` that runs some steps in another way where it is given their runs."""

    def plans(self, rows: int, runs: Runs) -> bool:
        """Whether that is faster for a step of so many rows than a graph, which was captured without runs."""
        ...


@runtime_checkable
class Skipper(Protocol):
    """A `RowDecoder` that finds out on the device that it has nothing to do."""

    def skips(self, rows: int) -> bool:
        """Whether a captured step of so many rows and logit rows is over at once where all of them are inactive."""
        ...


@runtime_checkable
class Accompanied(Protocol):
    """A `RowDecoder` whose `forward` also runs elsewhere, where it is captured when it is captured here."""

    def replaying(self, rows: int, logit_rows: int) -> None:
        """A graph that holds a captured `forward` of so many rows and logit rows is replayed next."""
        ...
