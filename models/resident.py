"""Device-resident decoding: what a worker tells a device ahead of a step, and what it reads after it.

A slot's next token, position and liveness stay on the device. The host queues a step before it has seen the results of the one
before: rows of slots that left or ended in between are inactive there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from models.batch import IntArray, ModelRunner

OWN_TOKEN = -1
"""In `StepRows.tokens`: the slot's own next token and position, if the slot is still active when the step runs."""
NO_ROUTE = -1


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """What a slot's request asks for; holds from the next launched step on."""

    slot: int
    prompt_length: int
    max_tokens: int
    """The answer ends when the token with output index max_tokens - 1 is there."""
    min_tokens: int
    """Below this output index the stop ids are banned."""
    stop_ids: tuple[int, ...]
    """Ids that end the answer; at most `Resident.max_stop_ids`."""
    temperature: float
    """0 = greedy."""
    top_k: int
    top_p: float
    min_p: float
    seed: int
    """64 bits."""
    choice: int
    route: int
    """Index into the routes given to `set_routes`, or NO_ROUTE."""
    routable: bool
    """False: the first token here is committed whatever the algorithm says (`max_stall`); later ones are routed."""
    params: tuple[float, ...]
    """The route's numeric parameters in `DeviceRoute.params` order, overrides of the request applied."""


@dataclass(slots=True)
class RoutedRows:
    """R rows as a routing function sees them, all on the device; rows of other routes are among them, their answers are ignored."""

    logits: torch.Tensor
    """[R, V] float32, raw: before temperature and any mask."""
    hidden: torch.Tensor
    """[R, H] the LM head's input."""
    tokens: torch.Tensor
    """[R] int64: the sampled tokens."""
    index: torch.Tensor
    """[R] int64: output index of the sampled token."""
    seed: torch.Tensor
    """[R] int64."""
    choice: torch.Tensor
    """[R] int64."""
    params: dict[str, torch.Tensor]
    """Each numeric parameter, [R] float32."""


@dataclass(frozen=True, slots=True)
class DeviceRoute:
    """A route whose decision may run on the device."""

    name: str
    decide: Callable[[RoutedRows], torch.Tensor]
    """[R] int64 destinations, 0 = stay; tensor code without host synchronisation, so that it can be captured."""
    params: tuple[str, ...]
    """Names of its numeric parameters."""


@dataclass(slots=True)
class StepRows:
    """T token rows of one step, as the host sees them: see `Batch` for their order."""

    slots: IntArray
    """[T]"""
    tokens: IntArray
    """[T] ids to feed, or OWN_TOKEN (one row per slot then)."""
    positions: IntArray
    """[T] positions; ignored where the token is OWN_TOKEN."""
    logit_rows: IntArray
    """[R] rows whose logits are wanted: the last one of a run. Its slot is active afterwards unless it left or ended."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class StepRecord:
    """What a step decided, in the order of its `logit_rows`. Rows that were inactive hold garbage: `alive` is False."""

    step: int
    alive: npt.NDArray[np.bool_]
    """[R] the row was fed."""
    tokens: npt.NDArray[np.int32]
    """[R]"""
    destinations: npt.NDArray[np.int32]
    """[R] 0 = stay, k = the k-th other model of the route; what the algorithm gave, unchecked."""
    stays: npt.NDArray[np.bool_]
    """[R] the slot is still active: not handed off, no stop id, budget left."""
    seconds: float
    """How long the step took on the device (or since the one before it ended, if it was queued behind that)."""


class Resident(ModelRunner, Protocol):
    """A model runner that keeps decode state on its device."""

    depth: int
    """Most steps in flight that pay."""
    max_stop_ids: int

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        """Prepare the algorithms for the device. Returns for each whether it runs there; the others are decided by the host."""
        ...

    def setup(self, setup: SlotSetup) -> None:
        """A request holds this slot now, or its parameters have changed."""
        ...

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Entries `first`... of the slot's page table row."""
        ...

    def quick(self, rows: StepRows) -> bool:
        """Whether `launch` only replays graphs; otherwise it takes milliseconds of host time and belongs in a thread."""
        ...

    def skips(self, rows: int) -> bool:
        """Whether a step of so many own tokens is over at once when no slot of them is active any more."""
        ...

    def launch(self, rows: StepRows) -> int:
        """Queue a step behind those in flight, after everything that was set up. Returns its number, rising from 1.

        When it raises, nothing was queued. The same object is given again while nothing in it changes.
        """
        ...

    def poll(self) -> StepRecord | None:
        """The record of the oldest step not yet polled, or None while it runs. Never blocks. When it raises, the device is lost."""
        ...

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet polled."""
        ...


def is_resident(runner: ModelRunner) -> TypeGuard[Resident]:
    """Whether the runner takes steps ahead of their results."""
    return hasattr(runner, "launch")
