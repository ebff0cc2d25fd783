"""A lookup model as a row decoder, so that the real device runner can be put behind workers that know every answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from models.batch import Batch, StepOutput
from models.device_runner import DeviceRunner
from models.rows import Rows, Runs
from tests.worker.lookup import LookupRunner
from tests.worker.resident import MOST_SLOTS


class LookupRows:
    """RowDecoder on a CPU over a LookupRunner; rows that are not fed give zeros."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, runner: LookupRunner) -> None:
        self.runner = runner
        self.config: Any = SimpleNamespace(hidden_size=runner.hidden_size)
        self.embedding = torch.zeros(runner.vocab_size, runner.hidden_size)
        self.vocab_size = runner.vocab_size
        self.context_length, self.page_size = runner.context_length, runner.page_size
        self.num_pages = runner.num_pages

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        positions = rows.positions.numpy().astype(np.int64)
        wanted = rows.logit_rows.numpy()
        fed = np.flatnonzero(positions >= 0)
        alive = np.flatnonzero(positions[wanted] >= 0)
        batch = Batch(
            tokens=rows.tokens.numpy()[fed].astype(np.int64),
            positions=positions[fed],
            slots=rows.slots.numpy()[fed].astype(np.int64),
            page_table=rows.page_table.numpy(),
            logit_rows=np.searchsorted(fed, wanted[alive]),
            output_index=np.zeros(len(alive), np.int64),
        )
        output = self.runner.step(batch)
        logits = torch.zeros(len(wanted), self.vocab_size)
        hidden = torch.zeros(len(wanted), self.runner.hidden_size)
        logits[torch.from_numpy(alive)], hidden[torch.from_numpy(alive)] = output.logits, output.hidden
        return StepOutput(logits, hidden)


def device_runner(runner: LookupRunner, depth: int) -> DeviceRunner:
    """The real `Resident` over a lookup model."""
    pages = -(-runner.context_length // runner.page_size)
    return DeviceRunner(LookupRows(runner), max_slots=MOST_SLOTS, max_pages=pages, depth=depth)
