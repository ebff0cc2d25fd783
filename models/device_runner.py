"""Device-resident decoding over any row decoder: the host's side of `Resident`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from models.batch import Batch, IntArray, StepOutput
from models.eager_steps import EagerSteps
from models.resident import NO_ROUTE, OWN_TOKEN, DeviceRoute, SlotSetup, StepRecord, StepRows
from models.rows import RowDecoder, Runs
from models.slots import MAX_STOP_IDS, SlotTable

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 152, 168, 184, 200, 224, 256, 320, 384, 512)
"""Token rows of captured steps. On an H200 the products of Qwen3-32B take 17.5 ms at 128 rows, 19.1 at 152, 19.9 at 168, 20.6 at
184, 21.4 at 200 (22.2 at 192), 23.0 at 224, 24.4 at 256, 32.1 at 320, 33.7 at 384 and 44.3 at 512; launching a step kernel by
kernel keeps the host for 25 ms and more."""


_FEW = 16
"""Rows up to which a loop finds a step's runs sooner than numpy, in a fifth of its 15 us where there is one row."""


class Steps(Protocol):
    """What runs steps on one kind of device."""

    @property
    def graph_bytes(self) -> int:
        """Device memory that captured graphs take."""
        ...

    def capture(self) -> None:
        """Capture every graph for the routes that are set."""
        ...

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        """Which of the routes this device can decide."""
        ...

    def quick(self, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> bool:
        """Whether the step is a replay of graphs."""
        ...

    def skips(self, rows: int) -> bool:
        """Whether a step of so many rows, all of which are decided, is over at once where all of them are inactive."""
        ...

    def launch(self, number: int, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> None:
        """Queue step `number` with what the slot table has pending."""
        ...

    def poll(self) -> StepRecord | None:
        """The record of the oldest step that has not been asked for, if it is there."""
        ...

    def step(self, batch: Batch, runs: Runs) -> StepOutput:
        """A forward pass that leaves the slot records alone; returns when it is done."""
        ...


class DeviceRunner:
    """`Resident`: decode state on the decoder's device, steps queued ahead of their results.

    On a CPU a step is over when `launch` returns, with the same rules.

    Args:
        decoder: the model.
        max_slots: slots.
        max_pages: entries of a slot's page table row.
        depth: most steps in flight that pay.
        buckets: token rows of captured steps, rising.
        extend_graphs: capture also steps with several rows of a slot.
        steps: makes what runs the steps; None: what the decoder's device takes.
    """

    inline = False
    max_stop_ids = MAX_STOP_IDS

    def __init__(
        self,
        decoder: RowDecoder,
        *,
        max_slots: int,
        max_pages: int,
        depth: int = 2,
        buckets: Sequence[int] = BUCKETS,
        extend_graphs: bool = True,
        steps: Callable[[SlotTable], Steps] | None = None,
    ) -> None:
        self.depth = depth
        self.vocab_size = decoder.vocab_size
        self.hidden_size = decoder.config.hidden_size
        self.embedding: torch.Tensor | None = decoder.embedding
        self.context_length = decoder.context_length
        self.page_size = decoder.page_size
        self.num_pages = decoder.num_pages
        self._slots = SlotTable(max_slots, max_pages, decoder.device)
        self._steps = steps(self._slots) if steps else _steps(decoder, self._slots, tuple(buckets), extend_graphs)
        self._decided: tuple[bool, ...] = ()
        self._route = np.full(max_slots, NO_ROUTE, np.int64)
        """Per slot: its route if the device decides it."""
        self._next = np.zeros(max_slots, np.int64)
        """Per slot: the position of its own next token, if it stays till then."""
        self._asked: tuple[StepRows | None, tuple[int, ...]] = None, ()
        """The latest rows and their routes, until some slot's changes."""
        self._found: tuple[StepRows, Runs] | None = None
        """The latest rows and their runs, until they are launched."""
        self._launched = 0
        self._polled = 0

    @property
    def graph_bytes(self) -> int:
        """Device memory that captured graphs take."""
        return self._steps.graph_bytes

    @property
    def routes(self) -> int:
        """How many are set."""
        return len(self._decided)

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet polled."""
        return self._launched - self._polled

    def capture(self) -> None:
        """Capture graphs for all buckets and the routes that are set; nothing may be in flight. Takes seconds."""
        self._expect_idle("capture()")
        self._steps.capture()

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        """Try every route on the device; nothing may be in flight. Captured graphs know the routes of their `capture`."""
        self._expect_idle("set_routes()")
        self._decided = self._steps.set_routes(routes)
        return self._decided

    def setup(self, setup: SlotSetup) -> None:
        """A request holds this slot now, or its parameters have changed.

        Raises:
            ValueError: naming the field that a slot cannot hold.
        """
        if setup.route != NO_ROUTE and not 0 <= setup.route < len(self._decided):
            raise ValueError(f"route: {setup.route}, but {len(self._decided)} routes are set")
        if setup.route != NO_ROUTE and not self._decided[setup.route]:
            setup = replace(setup, route=NO_ROUTE)
        self._slots.setup(setup)
        self._route[setup.slot] = setup.route
        self._asked = None, ()

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Entries `first`... of the slot's page table row. Raises ValueError when they do not fit."""
        self._slots.set_pages(slot, first, pages)

    def quick(self, rows: StepRows) -> bool:
        """Whether `launch` only replays graphs."""
        return self._steps.quick(rows, self._runs_of(rows), self._routes_of(rows))

    def skips(self, rows: int) -> bool:
        """Whether a step of so many own tokens is over at once when no slot of them is active any more."""
        return self._steps.skips(rows)

    def launch(self, rows: StepRows) -> int:
        """Queue a step behind those in flight; returns its number."""
        runs = self._runs_of(rows)
        self._steps.launch(self._launched + 1, rows, runs, self._routes_of(rows))
        self._launched += 1
        self._next[runs.slots] = runs.starts + runs.counts
        self._found = None
        return self._launched

    def poll(self) -> StepRecord | None:
        """The record of the oldest step not yet polled, or None while it runs."""
        if self._polled == self._launched:
            return None
        record = self._steps.poll()
        if record is not None:
            self._polled += 1
        return record

    def step(self, batch: Batch) -> StepOutput:
        """Feed the rows and wait for logits and hidden states, which stay valid until the next launch or step."""
        self._expect_idle("step()")
        columns = int(batch.positions.max(initial=0)) // self.page_size + 1
        self._slots.match_pages(batch.slots, batch.page_table, columns)
        return self._steps.step(batch, _find_runs(batch.slots, batch.positions))

    def _runs_of(self, rows: StepRows) -> Runs:
        if self._found is None or self._found[0] is not rows:
            if len(rows) <= _FEW:
                runs = _few_runs(rows, self._next)
            else:
                runs = _find_runs(
                    rows.slots, np.where(rows.tokens == OWN_TOKEN, self._next[rows.slots], rows.positions)
                )
            self._found = rows, runs
        return self._found[1]

    def _routes_of(self, rows: StepRows) -> tuple[int, ...]:
        """Routes of the logit rows that the device decides, rising."""
        if self._asked[0] is not rows:
            present = set(self._route[rows.slots[rows.logit_rows]].tolist())
            present.discard(NO_ROUTE)
            self._asked = rows, tuple(sorted(present))
        return self._asked[1]

    def _expect_idle(self, call: str) -> None:
        if self.in_flight:
            raise RuntimeError(f"{call} with {self.in_flight} steps in flight: poll their records first")


def _steps(decoder: RowDecoder, slots: SlotTable, buckets: tuple[int, ...], extend_graphs: bool) -> Steps:
    if decoder.device.type != "cuda":
        return EagerSteps(decoder, slots)
    from models.cuda.captured_steps import CudaSteps  # imports triton

    return CudaSteps(decoder, slots, buckets, extends=extend_graphs)


def _few_runs(rows: StepRows, following: IntArray) -> Runs:
    """Runs of a step's rows; `following`: per slot, the position of its own next token."""
    firsts: list[int] = []
    counts: list[int] = []
    starts: list[int] = []
    slots: list[int] = []
    last = -1
    given = zip(rows.slots.tolist(), rows.tokens.tolist(), rows.positions.tolist(), strict=True)
    for row, (slot, token, position) in enumerate(given):
        if slot == last:
            counts[-1] += 1
            continue
        last = slot
        firsts.append(row)
        counts.append(1)
        starts.append(following[slot] if token == OWN_TOKEN else position)
        slots.append(slot)
    return Runs(*(np.array(line, np.int64) for line in (firsts, counts, starts, slots)))


def _find_runs(slots: IntArray, positions: IntArray) -> Runs:
    """Runs of rows of one slot."""
    edge = np.ones(len(slots) + 1, np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=edge[1:-1])
    edges = edge.nonzero()[0]
    firsts = edges[:-1]
    return Runs(firsts=firsts, counts=edges[1:] - firsts, starts=positions[firsts], slots=slots[firsts])
