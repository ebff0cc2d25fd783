"""Steps made up at the start: the largest ones, to see how much memory a step takes, and one of each kind of prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from models.batch import Batch, IntArray
from models.resident import NO_ROUTE, SlotSetup, StepRows
from models.sampler import SamplingRows
from trouterd.config import Model

_LEAST_PREFILL = 512
"""Rows; steps of up to half as many have graphs, or their kernels."""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """`singles` requests of one row each in the first slots, and in the next one a run of rows that ends a full context.

    All requests share the pages of a pool of one context; what comes out means nothing.
    """

    singles: int
    run: int
    """Rows."""
    context: int
    """Tokens."""
    page_size: int

    @property
    def pages(self) -> int:
        """Of the context."""
        return -(-self.context // self.page_size)

    @property
    def _logit_rows(self) -> IntArray:
        return np.append(np.arange(self.singles), self.singles + self.run - 1)

    def rows(self) -> StepRows:
        """For a resident runner."""
        return StepRows(
            slots=np.append(np.arange(self.singles), np.full(self.run, self.singles)),
            tokens=np.zeros(self.singles + self.run, np.int64),
            positions=np.append(np.zeros(self.singles, np.int64), np.arange(self.context - self.run, self.context)),
            logit_rows=self._logit_rows,
        )

    def batch(self) -> Batch:
        """The same for any runner."""
        rows = self.rows()
        table = np.zeros((self.singles + 1, self.pages), np.int32)
        table[self.singles] = np.arange(self.pages)
        return Batch(
            tokens=rows.tokens,
            positions=rows.positions,
            slots=rows.slots,
            page_table=table,
            logit_rows=rows.logit_rows,
            output_index=np.zeros(len(rows.logit_rows), np.int64),
        )

    def setups(self) -> Iterator[SlotSetup]:
        """Of its slots: sampled in the most costly way."""
        for slot in range(self.singles + 1):
            yield SlotSetup(
                slot=slot,
                prompt_length=1 if slot < self.singles else self.context,
                max_tokens=2,
                min_tokens=0,
                stop_ids=(),
                temperature=1.0,
                top_k=50,
                top_p=0.9,
                min_p=0.01,
                seed=slot,
                choice=0,
                route=NO_ROUTE,
                routable=False,
                params=(),
            )

    def sampling(self) -> SamplingRows:
        """The same for the host's sampler."""
        count = self.singles + 1
        return SamplingRows(
            temperature=np.ones(count, np.float32),
            top_k=np.full(count, 50),
            top_p=np.full(count, 0.9, np.float32),
            min_p=np.full(count, 0.01, np.float32),
            seed=np.arange(count, dtype=np.uint64),
            choice=np.zeros(count, np.int64),
            output_index=np.zeros(count, np.int64),
        )


def prefill_steps(model: Model, context: int) -> Iterator[LargestStep]:
    """Short prompts: kernels are compiled by powers of two of a step's rows, and again where addresses are not aligned, which
    takes seconds that nobody should wait for while others decode. To be run before graphs are captured."""
    size = min(_LEAST_PREFILL, model.max_batch_tokens, context)
    while size:
        for run in (size, size - 1):
            if run:
                yield LargestStep(0, run, run, model.page_size)
        most = min(model.max_batch_tokens, context)
        size = min(2 * size, most) if size < most else 0


def largest_steps(model: Model, context: int) -> Iterator[LargestStep]:
    """One with as much prompt as possible, one with as many requests as possible."""
    for singles in {0, min(model.max_requests, model.max_batch_tokens) - 1}:
        run = min(model.max_batch_tokens - singles, context)
        yield LargestStep(singles, run, context, model.page_size)
