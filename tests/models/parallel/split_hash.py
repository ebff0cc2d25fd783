"""A rank's part of `HashRows`: sums and logits are dealt out, and come together without rounding.

Run as a module it is a rank's process. The name of the model says what goes wrong: see `_load`.
"""

from __future__ import annotations

import time

import torch

from models.batch import StepOutput
from models.config import ModelError
from models.cuda.shard import Shard
from models.parallel.leader import SplitModel
from models.parallel.link import Load
from models.rng import item_bits_tensor
from models.rows import Rows, Runs
from tests.models.hash_rows import PAGE, VOCAB, HashRows
from trouterd.worker.rank import main

PAGES = 16
"""Of a page table's row."""


class SplitHash(HashRows):
    """A `Part`: sees the positions that are its own, and gives the logits of a block of ids."""

    weight_bytes = 1000
    kv_bytes_per_page = 8 * PAGE

    def __init__(self, shard: Shard, device: str = "cpu") -> None:
        super().__init__(num_pages=0, max_pages=PAGES, device=device)
        self._shard = shard
        self._own = self._place % shard.world == shard.rank
        self.weight_bytes += shard.rank
        self.embedding = torch.zeros(1, device=device)

    def allocate_kv(self, num_pages: int) -> None:
        if num_pages > 1000:
            raise torch.OutOfMemoryError("too many")
        self.num_pages = num_pages
        self._pool = torch.full((num_pages + 1, PAGE), -7, dtype=torch.int64, device=self.device)

    def plans(self, rows: int, runs: Runs) -> bool:
        return False

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        if runs is not None:
            check_runs(rows, runs)
        positions, wanted = rows.positions.long(), rows.logit_rows.long()
        active, place = positions >= 0, positions.clamp(min=0)
        pages = torch.where(active, rows.page_table[rows.slots.long(), place // PAGE].long(), self.num_pages)
        own = self._own[place]
        # What lies at other ranks' positions is theirs to know.
        self._pool[pages, place % PAGE] = torch.where(own, rows.tokens.long(), -1)
        seen = self._pool[rows.page_table[rows.slots[wanted].long()].long()].flatten(1)
        visible = (self._place <= positions[wanted][:, None]) & self._own
        state = torch.where(visible, item_bits_tensor(seen, self._place), 0).sum(dim=1)
        self._shard.all_reduce(state)
        whole = self.output(state)
        block = -(-VOCAB // self._shard.world)
        ids = torch.arange(block, device=self.device) + self._shard.rank * block
        local = whole.logits[:, ids.clamp(max=VOCAB - 1)].masked_fill(ids >= VOCAB, 1e9)
        return StepOutput(self._shard.all_gather(local)[:, :VOCAB], whole.hidden)


def check_runs(rows: Rows, runs: Runs) -> None:
    """What the host says of the runs is what the rows say, as far as they are active."""
    firsts = torch.from_numpy(runs.firsts)
    counts, positions, slots = (part.cpu().long()[firsts] for part in (rows.counts, rows.positions, rows.slots))
    active = positions >= 0
    assert torch.equal(counts, torch.from_numpy(runs.counts))
    assert torch.equal(positions[active], torch.from_numpy(runs.starts)[active])
    assert torch.equal(slots, torch.from_numpy(runs.slots))


def model(kind: str, world: int, device: str = "cpu") -> SplitModel:
    """Ranks on the CPU or on GPUs ("cuda"); `kind` is for `load`."""
    devices = (device,) * world if device == "cpu" else tuple(f"{device}:{rank}" for rank in range(world))
    return SplitModel(path=kind, devices=devices)


def load(order: Load, shard: Shard) -> SplitHash:
    """Kinds: hash; refuse, raise or hang, which the last rank does on loading; fail, which it does in its third step."""
    if shard.rank < shard.world - 1:
        return SplitHash(shard, order.device)
    match order.path:
        case "refuse":
            raise ModelError("cpu: not enough memory")
        case "raise":
            raise ValueError("unheard\nof")
        case "hang":
            time.sleep(60)
        case "fail":
            return Failing(shard, order.device)
    return SplitHash(shard, order.device)


class Failing(SplitHash):
    """Its third step fails."""

    left = 3

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        self.left -= 1
        if not self.left:
            raise ValueError("a step\nfails")
        return super().forward(rows, runs)


if __name__ == "__main__":
    main(load=load)
