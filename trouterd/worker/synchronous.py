"""One step at a time: the host feeds known tokens, waits for the logits and decides from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np
import torch

from models.batch import Batch, ModelRunner, PageTable
from trouterd.worker.decision import decide
from trouterd.worker.request import Request
from trouterd.worker.scheduler import Chunk
from trouterd.worker.stepper import NEVER, Outcome


class SynchronousStepper:
    """Runs steps on any model runner. `run` touches tensors and the requests' scratch space only, so that it may run in another
    thread while the loop serves I/O."""

    def __init__(self, runner: ModelRunner, page_table: PageTable, thread: Executor) -> None:
        self.runner = runner
        self.page_table = page_table
        self.steps = 0
        self.started = 0.0
        self._thread = thread
        self._outcome: Outcome | None = None

    @property
    def in_flight(self) -> int:
        """1 between `launch` and `poll`."""
        return int(self._outcome is not None)

    @property
    def running(self) -> int:
        """The same: what runs here was known to be needed."""
        return self.in_flight

    def hosted(self, request: Request) -> bool:
        """Never: here the host decides all of them."""
        del request
        return False

    def launch_at(self, hosted: bool) -> float:
        """At once when the last step's outcome has been taken."""
        del hosted
        return NEVER if self._outcome else 0.0

    def worthwhile(self, chunks: Sequence[Chunk]) -> bool:
        """Always: every row is certain."""
        del chunks
        return True

    async def launch(self, chunks: Sequence[Chunk], meanwhile: Callable[[], None]) -> None:
        """Run the step to its end."""
        batch = build(chunks, self.page_table)
        routed = [c.request.may_leave for c in chunks if c.wants_logits]
        if self.runner.inline:
            meanwhile()
            self._outcome = self.run(chunks, batch, routed)
        else:
            loop = asyncio.get_running_loop()
            # Said by the other thread: what this one does before that one has got hold of the interpreter delays the step.
            begun = partial(loop.call_soon_threadsafe, meanwhile)
            self._outcome = await loop.run_in_executor(self._thread, self.run, chunks, batch, routed, begun)

    def run(
        self, chunks: Sequence[Chunk], batch: Batch, routed: Sequence[bool], begun: Callable[[], object] = lambda: None
    ) -> Outcome:
        """Forward, sample and route.

        Args:
            chunks: what is fed.
            batch: the same as token rows.
            routed: which of the requests whose logits are wanted may be handed off now, in order.
            begun: called first.
        """
        begun()
        self.started = begin = time.monotonic()
        try:
            with torch.inference_mode():
                made = decide(self.runner.step(batch), batch, [c for c in chunks if c.wants_logits], routed)
            count = len(routed)
            seconds = time.monotonic() - begin
            return Outcome(
                chunks,
                [True] * count,
                made.tokens,
                made.destinations,
                [False] * count,
                seconds,
                made.accepted,
                made.scores,
            )
        finally:
            self.started = 0.0
            self.steps += 1

    def poll(self) -> Outcome | None:
        """The outcome of the step that was launched."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def nap(self, now: float) -> float:
        """There is never anything to wait for."""
        del now
        return 0.0


def build(chunks: Sequence[Chunk], page_table: PageTable) -> Batch:
    """The batch that feeds the chunks, all of whose tokens are known."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    output_index: list[int] = []
    for chunk in chunks:
        request, first, count = chunk.request, chunk.first, chunk.count
        if count == 1:
            tokens.append(request.tokens[first])
            positions.append(first)
            slots.append(request.slot)
        else:
            tokens += request.tokens[first : first + count]
            positions += range(first, first + count)
            slots += [request.slot] * count
        for back in range(chunk.wanted, 0, -1):
            logit_rows.append(len(tokens) - back)
            output_index.append(chunk.end - back + 1 - request.prompt_length)
    return Batch(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slots=np.array(slots, dtype=np.int64),
        page_table=page_table,
        logit_rows=np.array(logit_rows, dtype=np.int64),
        output_index=np.array(output_index, dtype=np.int64),
    )
