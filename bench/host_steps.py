"""The host's half of device-resident steps: entries are written and records read as for a GPU, and nothing is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from models.batch import Batch, StepOutput
from models.cuda.inbox import MAX_CHANGES, Inbox
from models.cuda.record_ring import RecordRing
from models.device_runner import BUCKETS
from models.resident import OWN_TOKEN, DeviceRoute, StepRecord, StepRows
from models.rows import Rows, Runs
from models.slots import SlotTable

_ENTRIES = 16
_TOKEN = 42


class NoRows:
    """RowDecoder that is never asked."""

    def __init__(self, pages: int, page_size: int, context: int, vocab: int) -> None:
        self.config: Any = SimpleNamespace(hidden_size=8)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.embedding = torch.zeros(1, 8)
        self.vocab_size, self.context_length = vocab, context
        self.page_size, self.num_pages = page_size, pages

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        """Never asked for."""
        raise NotImplementedError


class HostSteps:
    """`Steps` of no time: a request stays for `run` tokens and is then handed to the route's other model.

    Args:
        slots: as for a device.
        run: tokens per visit.
        on_launch: called when a step has been queued.
        on_record: called when a record has been read.
    """

    graph_bytes = 0

    def __init__(
        self, slots: SlotTable, run: int, on_launch: Callable[[], None], on_record: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._run = run
        self._on_launch, self._on_record = on_launch, on_record
        self._inbox = Inbox(_ENTRIES, BUCKETS[-1], pinned=False)
        self._records = RecordRing(_ENTRIES, max(BUCKETS[-1], slots.max_slots), pinned=False)
        self._words = self._records.memory.numpy()
        self._turn = 0
        self._open: deque[tuple[int, int]] = deque()
        self._here = np.zeros(slots.max_slots, np.int64)
        """Per slot: tokens of this visit."""
        self._active = np.zeros(slots.max_slots, np.bool_)

    def capture(self) -> None:
        """Nothing to capture."""

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        """All of them."""
        return (True,) * len(routes)

    def quick(self, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> bool:
        """Steps that fit a bucket, as on a GPU."""
        del runs, routes
        return len(rows) <= BUCKETS[-1]

    def skips(self, rows: int) -> bool:
        """Steps take no time."""
        del rows
        return True

    def launch(self, number: int, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> None:
        """Queue step `number`, and run it."""
        wanted = len(rows.logit_rows)
        changes = self._slots.take()
        if self.quick(rows, runs, routes):
            # More changes than an entry holds go ahead of it, copied to the device.
            changes = changes if changes.shape[1] <= MAX_CHANGES else changes[:, :0]
            self._inbox.write(self._turn, rows, runs, changes, wanted)
        self._on_launch()
        self._decide(rows, wanted, routed=bool(routes))
        self._turn += 1
        self._open.append((number, wanted))

    def _decide(self, rows: StepRows, wanted: int, *, routed: bool) -> None:
        own = rows.tokens[rows.logit_rows] == OWN_TOKEN
        slots = rows.slots[rows.logit_rows]
        alive = ~own | self._active[slots]
        self._here[slots] = np.where(own, self._here[slots], 0) + 1
        leaves = (self._here[slots] >= self._run) & routed
        self._active[slots] = alive & ~leaves
        words = self._words[self._turn % _ENTRIES]
        lines = words[16 : 16 + 3 * self._records.rows].reshape(3, -1)
        lines[0, :wanted] = _TOKEN
        lines[1, :wanted] = leaves
        lines[2, :wanted] = alive + 2 * (alive & ~leaves)
        words[:6].view(np.int64)[:] = self._turn + 1, 0, 0

    def poll(self) -> StepRecord | None:
        """The record of the oldest step in flight."""
        number, count = self._open[0]
        record = self._records.read(self._turn - len(self._open), number, count)
        if record is not None:
            self._open.popleft()
            self._on_record()
        return record

    def step(self, batch: Batch, runs: Runs) -> StepOutput:
        """Never asked for."""
        raise NotImplementedError
