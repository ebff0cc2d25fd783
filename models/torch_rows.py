"""The reference runner as a row decoder: device-resident decoding on a CPU, with rows independent of each other."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from models.batch import Batch, StepOutput
from models.rows import Rows, Runs
from models.torch_runner import TorchRunner


class TorchRows:
    """RowDecoder over a TorchRunner on a CPU: every row gives the bits that `TorchRunner.step` gives."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.config = runner.config
        self.device = runner.device
        self.dtype = runner.dtype
        self.embedding = cast("torch.Tensor", runner.embedding)
        self.vocab_size = runner.vocab_size
        self.context_length = runner.context_length
        self.page_size = runner.page_size
        self.num_pages = runner.num_pages

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        """Feed the active rows; logits and hidden states of inactive ones are zero."""
        del runs
        positions = rows.positions.numpy().astype(np.int64)
        wanted = rows.logit_rows.numpy()
        fed = np.flatnonzero(positions >= 0)
        logits = torch.zeros(len(wanted), self.vocab_size)
        hidden = torch.zeros(len(wanted), self.config.hidden_size, dtype=self.dtype)
        if len(fed):
            alive = np.flatnonzero(positions[wanted] >= 0)
            output = self._runner.step(
                Batch(
                    tokens=rows.tokens.numpy()[fed].astype(np.int64),
                    positions=positions[fed],
                    slots=rows.slots.numpy()[fed].astype(np.int64),
                    page_table=rows.page_table.numpy(),
                    logit_rows=np.searchsorted(fed, wanted[alive]),
                    output_index=np.zeros(len(alive), np.int64),
                )
            )
            index = torch.from_numpy(alive)
            logits[index], hidden[index] = output.logits, output.hidden
        return StepOutput(logits=logits, hidden=hidden)
