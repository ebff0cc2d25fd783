"""The first rank of a split model: a row decoder that takes the other ranks along.

It alone has slots, samples, routes and answers: the others run the same products on the same rows, so that neither random
numbers nor rounding can make ranks disagree. Routes may look at any logit, so the LM head's parts are gathered here whole, in
float32: 4 bytes * vocabulary * (world - 1) / world a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.batch import StepOutput
from models.parallel.exchange import layout_of, pack_rows, pack_runs
from models.parallel.group import Group
from models.parallel.link import Allocate, Capture, Join, Load, Loaded, Replay, Step
from models.parallel.part import Loader, allocate, load_part
from models.parallel.ranks import Ranks
from models.rows import Rows, Runs


@dataclass(frozen=True, slots=True)
class SplitModel:
    """What to load, and on which devices."""

    path: str
    devices: tuple[str, ...]
    """One for each rank."""
    dtype: str = "auto"
    load_format: str = "safetensors"
    page_size: int = 16
    vocab_size: int | None = None
    context_length: int | None = None
    ragged_prefill: bool = True
    """FlashInfer may run long prompts."""
    sm_percent: int = 0
    step_rows: tuple[int, ...] = ()
    """Both as of `Load`."""

    def order(self, rank: int) -> Load:
        """What to tell a rank."""
        return Load(
            rank=rank,
            world=len(self.devices),
            path=self.path,
            device=self.devices[rank],
            dtype=self.dtype,
            load_format=self.load_format,
            page_size=self.page_size,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            ragged_prefill=self.ragged_prefill,
            sm_percent=self.sm_percent,
            step_rows=self.step_rows,
        )


class LeadingDecoder:
    """A `RowDecoder` over all ranks; make it with `load`, then give it pages with `allocate_kv`.

    Whoever replays a graph that holds a captured `forward` calls `replaying` first. A capture follows a plain `forward` of the
    same shapes. After an exception out of `forward` the ranks are out of step, which is reported as the loss of rank 0; after
    one out of another method they are of no more use either.
    """

    def __init__(self, model: SplitModel, ranks: Ranks, load: Loader = load_part) -> None:
        """Load all parts at once.

        Args:
            model: what to load.
            ranks: the other ranks' processes, in which nothing is loaded yet.
            load: loads the first rank's part.

        Raises:
            ModelError: of whatever rank, in one line.
            RankLostError: another rank is gone.
        """
        self._ranks = ranks
        self._group = Group(0, ranks.world, torch.device(model.devices[0]))
        ranks.tell_each(model.order)
        self._part = part = load(model.order(0), self._group.shard())
        loaded = [answer for answer in ranks.answers() if isinstance(answer, Loaded)]
        self.config = part.config
        self.device = part.device
        self.dtype = part.dtype
        self.vocab_size = part.vocab_size
        self.context_length = part.context_length
        self.page_size = part.page_size
        self.num_pages = 0
        self.embedding = part.embedding
        self.weight_bytes = max([part.weight_bytes, *(answer.weight_bytes for answer in loaded)])
        """On the device that holds most."""
        self.kv_bytes_per_page = max([part.kv_bytes_per_page, *(answer.kv_bytes_per_page for answer in loaded)])
        ranks.tell(Join(store_fd=ranks.store_fd))
        self._group.join(ranks.store_fd, part.config.hidden_size, part.dtype)
        ranks.answers()

    def allocate_kv(self, num_pages: int) -> None:
        """Make room on every device; captured graphs are gone.

        Raises:
            ModelError: not enough memory, naming the device.
            RankLostError: another rank is gone.
        """
        self._ranks.tell(Allocate(pages=num_pages))
        allocate(self._part, num_pages)
        self._ranks.answers()
        self.num_pages = num_pages

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        """As `RowDecoder.forward`. Raises RankLostError."""
        layout = layout_of(rows)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        done = False
        try:
            self._ranks.tell(Capture(layout) if capturing else Step(layout, pack_runs(runs, layout)))
            self._group.broadcast(pack_rows(rows))
            output = self._part.forward(rows, runs)
            done = True
        finally:
            if not done:
                self._ranks.lose(0, "a step broke off")
        return output

    def plans(self, rows: int, runs: Runs) -> bool:
        """See `Planner`."""
        return self._part.plans(rows, runs)

    def replaying(self, rows: int, logit_rows: int) -> None:
        """A graph that holds a captured `forward` of so many rows is replayed next. Raises RankLostError."""
        self._ranks.tell(Replay(rows, logit_rows))

    def close(self) -> None:
        """Let the other ranks end."""
        self._ranks.close()
        self._group.leave()
