"""Several steps in flight on a runner that keeps decode state on its device: while one runs, the next is queued behind it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from models.batch import PageTable
from models.resident import OWN_TOKEN, Resident, StepRecord, StepRows
from trouterd.worker.decision import checked
from trouterd.worker.pace import SHORT, TICK, Pace
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute
from trouterd.worker.scheduler import Chunk
from trouterd.worker.slot_setups import SlotSetups
from trouterd.worker.stepper import NEVER, Outcome
from trouterd.worker.synchronous import SynchronousStepper

log = logging.getLogger(__name__)

SLOW_LAUNCH = 2.0
"""Seconds: a launch that takes longer has most likely waited for a compiler, which was to be over when the worker was ready."""
GAP = 0.25e-3
"""Seconds of idle device between two steps, which queueing the second ahead avoids where one of its rows is alive."""
SKIPPED = 0.15e-3
"""Seconds of a step that ends early since all its rows are dead: taking in, sampling, and the head of the routing algorithm."""


@dataclass(slots=True)
class _Flight:
    number: int
    chunks: Sequence[Chunk]
    rows: int
    routes: list[WorkerRoute | None]
    """Per chunk that wants logits: the route whose algorithm was asked, if it was."""
    launched: float
    gone: frozenset[tuple[int, int]] = frozenset()
    """Requests, with their residencies, of which the device has let go in steps before this one since it was launched."""

    @property
    def own(self) -> bool:
        """It feeds own tokens alone, whose requests may have left before it runs."""
        return all(chunk.own for chunk in self.chunks)

    @property
    def dead(self) -> bool:
        """They have, as the device knows: rows of requests that ended here alone, by an abort say, are fed all the same."""
        # In this order: asked at every look at a running step, behind one that nobody has left as a rule.
        return bool(self.gone) and all((c.request.rid, c.residency) in self.gone for c in self.chunks) and self.own


class PipelinedStepper:
    """Launches steps ahead of the results of those before.

    A chunk whose request the host decides runs alone, when nothing is in flight: the device's state of its slots is void then, and
    their next rows are fed from here.
    """

    def __init__(
        self, runner: Resident, routes: Iterable[WorkerRoute], page_table: PageTable, thread: Executor
    ) -> None:
        self.runner = runner
        self._alone = SynchronousStepper(runner, page_table, thread)
        self._setups = SlotSetups(runner, routes)
        self._thread = thread
        self._flights: deque[_Flight] = deque()
        self._pace = Pace()
        self._ended = 0
        self._last_end = 0.0
        self._repeat: tuple[list[int], StepRows] | None = None
        """The latest step of own tokens only, and its slots."""

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self._ended + self._alone.steps

    @property
    def started(self) -> float:
        """When the oldest step in flight began: when it was launched, or when the one before it was seen to have ended."""
        if not self._flights:
            return self._alone.started
        return max(self._flights[0].launched, self._last_end)

    @property
    def in_flight(self) -> int:
        """Steps launched whose outcome has not been taken."""
        return len(self._flights) + self._alone.in_flight

    @property
    def running(self) -> int:
        """Those of them that the device does not skip: some request of theirs has not left, as far as is known."""
        return sum([not self._skipped(flight) for flight in self._flights]) + self._alone.in_flight

    def hosted(self, request: Request) -> bool:
        """Whether the device cannot decide the request's tokens."""
        return self._setups.hosted(request)

    def launch_at(self, hosted: bool) -> float:
        """At once when the device is idle or its step is short; otherwise towards the end of the running step."""
        flying = len(self._flights)
        if not flying:
            return self._alone.launch_at(hosted)
        if hosted or flying >= self.runner.depth:
            return NEVER
        wait = self._pace.queue_from(self._flights[0].rows)
        if wait and flying > 1:
            return NEVER
        return self.started + wait

    def worthwhile(self, chunks: Sequence[Chunk]) -> bool:
        """False when another step is in flight, and what this one would take if that left it without a live row outweighs the gap
        that it fills otherwise, by their chances."""
        if not self._flights:
            return True
        dead = 1.0
        for chunk in chunks:
            if not chunk.own or chunk.first < len(chunk.request.tokens):
                return True
            dead *= 1.0 - chunk.request.route.stay_rate
        return dead * self._wasted(len(chunks)) <= (1.0 - dead) * GAP

    def _wasted(self, rows: int) -> float:
        """Seconds of a step of so many rows that are all dead."""
        if self.runner.skips(rows):
            return SKIPPED
        # Visits may never have had a step of so few rows.
        return self._pace.expected(rows) or self._pace.expected(self._flights[-1].rows)

    async def launch(self, chunks: Sequence[Chunk], meanwhile: Callable[[], None]) -> None:
        """Queue a step behind those in flight."""
        if any(c.request.hosted and c.wants_logits for c in chunks):
            await self._alone.launch(chunks, meanwhile)
            return
        update = self._setups.update
        routes = [c.request.route if update(c) else None for c in chunks if c.wants_logits]
        rows = self._rows(chunks)
        if self.runner.quick(rows):
            number = self.runner.launch(rows)
        else:
            number = await self._launch_elsewhere(rows)
        self._flights.append(_Flight(number, chunks, len(rows), routes, time.monotonic()))
        for chunk in chunks:
            chunk.request.chained = chunk.wants_logits

    def poll(self) -> Outcome | None:
        """What the oldest step has decided."""
        if self._alone.in_flight:
            return self._alone_outcome()
        record = self.runner.poll() if self._flights else None
        if record is None:
            return None
        flight = self._flights.popleft()
        if record.step != flight.number:
            raise RuntimeError(f"the device reports step {record.step}, the oldest one in flight is {flight.number}")
        return self._landed(flight, record)

    def nap(self, now: float) -> float:
        """Most of what is left of a long step; nothing at first of one that is about to be skipped."""
        if not self._flights:
            return 0.0
        flight = self._flights[0]
        if self._skipped(flight):
            # It is over at once, unless another model has the device meanwhile.
            return 0.0 if now - self.started < SHORT else TICK
        return self._pace.nap(flight.rows, now - self.started)

    def _skipped(self, flight: _Flight) -> bool:
        """Whether the device has nothing to do in it, as is known by now."""
        return flight.dead and self.runner.skips(flight.rows)

    async def _launch_elsewhere(self, rows: StepRows) -> int:
        """Launch in the thread for what takes milliseconds of host time."""
        begun = time.monotonic()
        number = await asyncio.get_running_loop().run_in_executor(self._thread, self.runner.launch, rows)
        seconds = time.monotonic() - begun
        if seconds > SLOW_LAUNCH:
            log.info(
                "the launch of a step of %d rows, %d of them decided, took %.1f s: the first one of its kind?",
                len(rows),
                len(rows.logit_rows),
                seconds,
            )
        return number

    def _alone_outcome(self) -> Outcome | None:
        outcome = self._alone.poll()
        if outcome is not None:
            for chunk in outcome.chunks:
                chunk.request.chained = False
        return outcome

    def _landed(self, flight: _Flight, record: StepRecord) -> Outcome:
        self._ended += 1
        self._last_end = time.monotonic()
        alive, stays, destinations = record.alive.tolist(), record.stays.tolist(), record.destinations.tolist()
        # A step of dead rows that ended early says nothing of live ones.
        if any(alive) or not (flight.own and self.runner.skips(flight.rows)):
            self._pace.observe(flight.rows, record.seconds)
        for row, route in enumerate(flight.routes):
            if route is None:
                destinations[row] = 0
            elif alive[row]:
                if destinations[row]:
                    destinations[row] = checked(route, destinations[row])
                route.stay_rate += (stays[row] - route.stay_rate) / 32
        if self._flights and not (all(alive) and all(stays)):
            self._let_go(flight, alive, stays)
        return Outcome(flight.chunks, alive, record.tokens.tolist(), destinations, stays, record.seconds)

    def _let_go(self, flight: _Flight, alive: Sequence[bool], stays: Sequence[bool]) -> None:
        """Tell the steps behind this one whose rows the device does not feed."""
        decided = zip((chunk for chunk in flight.chunks if chunk.wants_logits), alive, stays, strict=True)
        gone = {(chunk.request.rid, chunk.residency) for chunk, fed, stayed in decided if not (fed and stayed)}
        for later in self._flights:
            later.gone |= gone

    def _rows(self, chunks: Sequence[Chunk]) -> StepRows:
        """The step's rows; the very same object again where nothing but the device's own tokens changes from step to step."""
        if not all(chunk.own for chunk in chunks):
            self._repeat = None
            return _build(chunks)
        slots = [chunk.request.slot for chunk in chunks]
        if self._repeat is None or self._repeat[0] != slots:
            self._repeat = slots, _build(chunks)
        return self._repeat[1]


def _build(chunks: Sequence[Chunk]) -> StepRows:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for chunk in chunks:
        request, first, count = chunk.request, chunk.first, chunk.count
        if chunk.own:
            tokens.append(OWN_TOKEN)
            positions.append(0)
            slots.append(request.slot)
        elif count == 1:
            tokens.append(request.tokens[first])
            positions.append(first)
            slots.append(request.slot)
        else:
            tokens += request.tokens[first : first + count]
            positions += range(first, first + count)
            slots += [request.slot] * count
        if chunk.wants_logits:
            logit_rows.append(len(tokens) - 1)
    return StepRows(
        slots=np.array(slots, dtype=np.int64),
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        logit_rows=np.array(logit_rows, dtype=np.int64),
    )
