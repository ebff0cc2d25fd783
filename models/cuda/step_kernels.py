"""The kernels of a device-resident step around the model, with the memory that they work in."""

from __future__ import annotations

import platform

import torch
import triton

from models.cuda.inbox import Inbox
from models.cuda.kernels.choose import choose
from models.cuda.kernels.finish import finish
from models.cuda.kernels.ingest import fetch, ingest
from models.cuda.kernels.nucleus import weigh
from models.cuda.kernels.scan import GROUPS, IDS, QUANTITIES, scan
from models.cuda.record_ring import RecordRing
from models.device_routes import RouteInputs
from models.rows import Rows
from models.slots import MAX_PARAMS, SlotTable

_CHUNK = 2048
"""Vocabulary ids per program of a scan."""
_LIST = 8192
"""Candidates that a cut takes from a list; more are read from the logits, more slowly."""
_TILE = 1024
_BUCKETS = 1024
"""Of the mass of a row with top_p; the list takes one of them."""
_BLOCK = 256
_ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether a device sees the host's stores in program order: see `kernels.ingest`."""
_PROGRAMS = 264
"""Programs of a choice: what a large GPU holds at once."""


class StepKernels:
    """Launches on the current stream.

    Args:
        slots: slot records and page table.
        vocab: columns of the logits.
        rows: most rows of a captured step.
        wanted: most logit rows of any step.
        entries: turns that may be under way.
        on_device: False under Triton's interpreter, which has neither clock nor fence.
    """

    def __init__(
        self, slots: SlotTable, vocab: int, *, rows: int, wanted: int, entries: int, on_device: bool = True
    ) -> None:
        device = slots.cells.device
        self._slots = slots
        self._vocab = vocab
        self._wanted = wanted
        self._on_device = on_device
        self.inbox = Inbox(entries, rows, pinned=on_device)
        self.records = RecordRing(entries, wanted, pinned=on_device)
        self.clock = torch.zeros(3, dtype=torch.int64, device=device)
        """Turns done; start of the turn in progress; the turn after it."""
        self._fetched = torch.zeros(self.inbox.entry_words, dtype=torch.int32, device=device)
        self._rows = torch.zeros(5, rows, dtype=torch.int32, device=device)
        self._logit_rows = torch.zeros(rows, dtype=torch.int32, device=device)
        self._decided = torch.zeros(1, dtype=torch.int32, device=device)
        self._chunks = triton.cdiv(vocab, _CHUNK)
        self._quantities = torch.zeros(QUANTITIES.value, wanted, self._chunks, device=device)
        self._found = torch.zeros(IDS.value, wanted, self._chunks, dtype=torch.int32, device=device)
        self._candidates = torch.zeros(2, wanted, _LIST, dtype=torch.int32, device=device)
        self.counters = torch.zeros(2, wanted + 1, dtype=torch.int32, device=device)
        """Of candidates and of programs that are done; zero between steps."""
        self._groups = torch.zeros(wanted, self._chunks * GROUPS.value, device=device)
        self._scales = torch.zeros(wanted, device=device)
        self.masses = torch.zeros(wanted, _BUCKETS, dtype=torch.int64, device=device)
        """By bucket; zero between steps."""
        self._scores = torch.zeros(wanted, self._chunks, dtype=torch.float64, device=device)
        self._names = torch.zeros(wanted, self._chunks, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(4, wanted, dtype=torch.int64, device=device)
        self._row_route = torch.zeros(wanted, dtype=torch.int32, device=device)
        self._routes = 0
        self.set_routes(0)

    def set_routes(self, count: int) -> None:
        """Make room for the parameters and answers of so many routes."""
        device = self.clock.device
        self._routes = count
        self._params = torch.ones(max(count, 1), self._wanted, MAX_PARAMS, device=device)
        self.answers = torch.zeros(max(count, 1), self._wanted, dtype=torch.int32, device=device)
        """[routes, wanted] int32 destinations."""

    def rows(self, total: int, wanted: int) -> Rows:
        """Rows that always lie at the same address; inactive until the next `take_in`."""
        return self._as_rows(self._rows, self._logit_rows, total, wanted)

    def fresh_rows(self, total: int, wanted: int) -> Rows:
        """Rows of a step of any size."""
        device = self.clock.device
        rows = torch.empty(5, total, dtype=torch.int32, device=device)
        return self._as_rows(rows, torch.empty(wanted, dtype=torch.int32, device=device), total, wanted)

    def clear_rows(self) -> None:
        """Make every row at the fixed address inactive."""
        self._rows.zero_()
        self._rows[1].fill_(-1)
        self._rows[3].copy_(torch.arange(self._rows.shape[1], device=self._rows.device))
        self._rows[4].fill_(1)
        self._logit_rows.zero_()

    def _as_rows(self, rows: torch.Tensor, logit_rows: torch.Tensor, total: int, wanted: int) -> Rows:
        tokens, positions, slots, leaders, counts = (part[:total] for part in rows)
        return Rows(tokens, positions, slots, leaders, counts, self._slots.page_table, logit_rows[:wanted])

    def take_in(self, rows: Rows, entry: torch.Tensor | None = None) -> None:
        """Read this turn's entry, or one that lies on the device: change slot records, fill in the rows."""
        inbox = self.inbox
        ring = entry is None
        ingest[(1,)](
            inbox.memory if entry is None else entry,
            self._fetched,
            self.clock,
            self._slots.cells,
            rows.tokens,
            rows.positions,
            rows.slots,
            rows.leaders,
            rows.counts,
            rows.logit_rows,
            self._decided,
            inbox.entries if ring else 1,
            inbox.entry_words if ring else 0,
            inbox.span if ring else len(rows),
            len(rows),
            len(rows.logit_rows),
            BLOCK=_BLOCK,
            ON_DEVICE=self._on_device,
            num_warps=8,
        )

    def fetch(self, likely: int) -> None:
        """After `take_in`, beside what follows: bring the next turn's entry of `likely` rows here, if it is there already."""
        if not _ORDERED:
            return
        fetch[(1,)](
            self.inbox.memory,
            self._fetched,
            self.clock,
            self.inbox.entries,
            self.inbox.entry_words,
            self.inbox.span,
            likely,
            BLOCK=_BLOCK,
            ON_DEVICE=self._on_device,
            num_warps=8,
        )

    def forget(self) -> None:
        """What has been fetched is void: the entry is written again."""
        self._fetched.zero_()

    def draw(self, rows: Rows, logits: torch.Tensor, *, ends: bool) -> None:
        """A token for every decided logit row; with `ends` the step ends there, else routes see their inputs."""
        count = len(rows.logit_rows)
        common = (self._slots.cells, rows.positions, rows.slots, rows.logit_rows, self._decided)
        scanned = (logits, *common, self._quantities, self._found)
        extent = (self._wanted, logits.stride(0), self._vocab)
        scan[(self._chunks, count)](
            *scanned,
            self._groups,
            *extent,
            CHUNK=_CHUNK,
            CHUNKS=self._chunks,
            num_warps=4,
        )
        parts = max(1, min(self._chunks, _PROGRAMS // count))
        span = max(16, triton.next_power_of_2(self._chunks))
        weigh[(parts, count)](
            *scanned,
            self._scales,
            self.masses,
            *extent,
            CHUNK=_CHUNK,
            CHUNKS=self._chunks,
            SPAN=span,
            BUCKETS=_BUCKETS,
            num_warps=8,
        )
        choose[(parts, count)](
            *scanned,
            self._groups,
            self._candidates[0],
            self._candidates[1],
            self.counters[0],
            self.counters[1],
            self._scales,
            self.masses,
            self._scores,
            self._names,
            self._numbers,
            self._params,
            self._row_route,
            self.clock,
            self.records.memory,
            self._wanted,
            count,
            self.records.entries,
            self.records.entry_words,
            logits.stride(0),
            self._vocab,
            parts,
            0 if ends else self._routes,
            int(ends),
            CHUNK=_CHUNK,
            CHUNKS=self._chunks,
            SPAN=span,
            LIST=_LIST,
            TILE=_TILE,
            BUCKETS=_BUCKETS,
            BLOCK=_BLOCK,
            ON_DEVICE=self._on_device,
            num_warps=8,
        )

    def route_inputs(self, route: int, count: int) -> RouteInputs:
        """What a route sees of the rows after `draw`."""
        tokens, index, seed, choice = self._numbers[:, :count]
        return RouteInputs(tokens, index, seed, choice, self._params[route, :count], self._row_route[:count])

    def end(self, rows: Rows) -> None:
        """Ends, advance and record, after `draw` without `ends` and the routes' answers."""
        finish[(1,)](
            self._numbers,
            self.answers,
            self._slots.cells,
            rows.positions,
            rows.slots,
            rows.logit_rows,
            self._decided,
            self.clock,
            self.records.memory,
            self.records.entries,
            self.records.entry_words,
            self._wanted,
            len(rows.logit_rows),
            BLOCK=_BLOCK,
            ON_DEVICE=self._on_device,
            num_warps=8,
        )
