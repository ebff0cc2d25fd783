"""Steps made up at the start: the first ones of every kind that is served, and the largest ones, to see how much memory they take.

What a step needs for the first time (kernels that are compiled for it or loaded, a plan, a buffer) takes up to seconds, in which
nobody else decodes either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from models.batch import Batch, IntArray
from models.device_routes import FOREIGN
from models.resident import NO_ROUTE, SlotSetup, StepRows
from models.sampler import SamplingRows
from models.slots import MAX_PARAMS
from trouterd.config import Model

_LONG = 512
"""Rows; kernels are compiled by powers of two of them. Steps of up to half as many have graphs, or their kernels."""
_SHORTEST = 8
"""The same where not all of those have graphs: the persistent kernel takes so many, and others are no smaller."""
_PAIRS = 32, 64
"""Requests of two rows each where no step has graphs, up to `models.cuda.tiles.FEW_ROWS` in all: their attention is cut in a way of
its own. What is compiled for fewer is the same as for the first."""
_PROMPTS = 8
"""Of a step, at least: routes may decide few rows in other kernels than many."""
_PROMPT = 4095
"""Rows of one, at most: longer ones may have their attention from another library."""
_BESIDE = 15
"""Requests that decode beside a prompt, in one of the steps."""


@dataclass(frozen=True, slots=True)
class TrialStep:
    """Requests in the first slots feed rows from their beginning; those of the last one end a context.

    All share the pages of a pool of one context; what comes out means nothing.
    """

    counts: tuple[int, ...]
    """Rows, by slot."""
    context: int
    """Of the last request, tokens."""
    page_size: int
    wanted: int
    """How many requests, the last ones, get a token."""

    @property
    def _ends(self) -> IntArray:
        """Tokens of each request after the step."""
        return np.array((*self.counts[:-1], self.context), np.int64)

    @property
    def pages(self) -> list[int]:
        """Of each request."""
        return [-(-end // self.page_size) for end in self._ends.tolist()]

    def rows(self) -> StepRows:
        """For a resident runner."""
        counts = np.array(self.counts)
        last = np.cumsum(counts) - 1
        total = int(last[-1]) + 1
        return StepRows(
            slots=np.repeat(np.arange(len(counts)), counts),
            tokens=np.zeros(total, np.int64),
            positions=np.arange(total) + np.repeat(self._ends - 1 - last, counts),
            logit_rows=last[len(last) - self.wanted :],
        )

    def batch(self) -> Batch:
        """The same for any runner."""
        rows, pages = self.rows(), self.pages
        return Batch(
            tokens=rows.tokens,
            positions=rows.positions,
            slots=rows.slots,
            page_table=np.tile(np.arange(max(pages), dtype=np.int32), (len(pages), 1)),
            logit_rows=rows.logit_rows,
            output_index=np.zeros(len(rows.logit_rows), np.int64),
        )

    def rounds(self, routes: int) -> Iterator[list[SlotSetup]]:
        """Of its slots, for each time that it has to run until every one of this many routes has had a row."""
        ends = self._ends.tolist()
        for first in range(0, max(routes, 1), self.wanted or max(routes, 1)):
            yield [_setup(slot, end, (first + slot) % routes if routes else NO_ROUTE) for slot, end in enumerate(ends)]

    def sampling(self) -> SamplingRows:
        """The same for the host's sampler."""
        count = self.wanted
        return SamplingRows(
            temperature=np.ones(count, np.float32),
            top_k=np.full(count, 50),
            top_p=np.full(count, 0.9, np.float32),
            min_p=np.full(count, 0.01, np.float32),
            seed=np.arange(count, dtype=np.uint64),
            choice=np.zeros(count, np.int64),
            output_index=np.zeros(count, np.int64),
        )


def _setup(slot: int, tokens: int, route: int) -> SlotSetup:
    """Sampled in the most costly way."""
    return SlotSetup(
        slot=slot,
        prompt_length=tokens,
        max_tokens=2,
        min_tokens=0,
        stop_ids=(),
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        seed=slot,
        choice=0,
        route=route,
        routable=route != NO_ROUTE,
        params=(FOREIGN,) * MAX_PARAMS,
    )


def first_steps(model: Model, context: int) -> Iterator[TrialStep]:
    """One of each kind: prompts of any number of rows, short ones too; without a token, as while a visitor's prompt is read; beside
    requests that decode. To be run before graphs are captured."""
    most = min(model.max_batch_tokens, model.max_requests * context)
    least = size = min(_LONG if model.graphs and model.extend_graphs else _SHORTEST, most)
    while size:
        yield _prompts(model, context, size)
        size = min(2 * size, most) if size < most else 0
    for number in () if model.graphs else _PAIRS:
        yield _pairs(model, context, number)
    read = _prompts(model, context, least)
    yield TrialStep(read.counts, read.context, read.page_size, wanted=0)
    rows = min(_LONG, most)
    yield _beside(model, context, min(_BESIDE, rows - 1), rows)


def largest_steps(model: Model, context: int) -> Iterator[TrialStep]:
    """One with as much of a prompt as possible, one with as many requests as possible."""
    for singles in {0, min(model.max_requests, model.max_batch_tokens) - 1}:
        yield _beside(model, context, singles, model.max_batch_tokens)


def _prompts(model: Model, context: int, rows: int) -> TrialStep:
    """Prompts of about the same length."""
    number = min(max(_PROMPTS, -(-rows // min(context, _PROMPT))), model.max_requests, rows)
    rows = min(rows, number * _PROMPT)
    counts = tuple(rows // number + (place < rows % number) for place in range(number))
    return TrialStep(counts, counts[-1], model.page_size, wanted=number)


def _pairs(model: Model, context: int, number: int) -> TrialStep:
    """Two rows of each of so many requests, or of as many as there can be."""
    number, rows = min(number, model.max_requests, model.max_batch_tokens // 2), min(2, context)
    return TrialStep((rows,) * number, rows, model.page_size, wanted=number)


def _beside(model: Model, context: int, singles: int, rows: int) -> TrialStep:
    """The end of a full context beside requests of one row each, `rows` in all if the context has so many."""
    singles = min(singles, model.max_requests - 1)
    run = min(rows - singles, context)
    return TrialStep((1,) * singles + (run,), context, model.page_size, wanted=singles + 1)
