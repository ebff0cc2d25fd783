"""Records what a decode loop does, for `trouterctl trace`.

At every moment a model is in one `State`. What a pause was is known at its end only: the time between an outcome and the next
launch is the loop's, unless there turns out to be nothing to launch, or delayed batching holds it back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trouterd.tracing.events import Handoff, Idle, State, Step, Summary
from trouterd.worker.event_log import CAPACITY, EventLog
from trouterd.worker.launching import Launching
from trouterd.worker.scheduler import Chunk, Scheduler
from trouterd.worker.stats import Stats
from trouterd.worker.stepper import Outcome

LATENCIES = 1 << 14
"""Hand-offs that percentiles are taken over, the latest ones."""


@dataclass(slots=True)
class _Flight:
    """A step that was launched."""

    chunks: Sequence[Chunk]
    launched: float
    rows: int
    prefill: int
    arrivals: list[tuple[int, int, float]]
    """Request, sender and time of sending."""
    reason: str
    threshold: int
    ready: int
    queued: int


class Recorder:
    """One recording of one worker; the decode loop calls it, and nothing else changes it.

    Args:
        scheduler: of the worker, like launching and stats; all three are only read.
        in_flight: a step is in flight now.
        capacity: events that are kept.
        clock: time.monotonic, or a test's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        launching: Launching,
        stats: Stats,
        *,
        in_flight: bool,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._launching = launching
        self._stats = stats
        self._clock = clock
        self._begin = clock()
        self.log = EventLog(scheduler, stats, capacity)
        self._flights: deque[_Flight] = deque()
        self._state = self._first_state(in_flight)
        self._since = self._begin
        """When the state began."""
        self._woke = 0.0
        """When the loop last woke in an idle state; 0: it has found since that the state goes on."""
        self._ended = self._begin
        """When the running step could begin at the earliest: the launch of the first, the end of the one before."""
        self._slack = 0.0
        """Seconds of a run of steps in which the device may have been at work on the next one already."""
        self._spent = dict.fromkeys(State, 0.0)
        self._busy = 0.0
        self._prefill = 0.0
        self._steps = 0
        self._alive = 0
        self._tokens = stats.tokens
        self._handoffs = 0
        self._latencies: deque[float] = deque(maxlen=LATENCIES)

    # From the decode loop

    def turn(self) -> None:
        """A turn of the loop begins."""
        now = self._clock()
        if self._state not in (State.STEP, State.LOOP) and not self._woke:
            self._woke = now
        self.log.note_totals(now)
        self.log.begin_work("events", now)

    def launch(self, chunks: Sequence[Chunk], queued: int) -> None:
        """A step is about to be launched, behind `queued` ones in flight; to be called before it changes its requests."""
        now = self._clock()
        self.log.end_work(now)
        self.log.note_queues(now)
        if queued:
            self._flying()
        else:
            if self._woke:
                self._enter(State.LOOP, self._woke)
            self._enter(State.STEP, now)
        self._flights.append(self._flight(chunks, now, queued))
        self.log.begin_work("launch", now)

    def failed(self, in_flight: int) -> None:
        """The step that was to be launched is none."""
        if self._flights:
            self._flights.pop()
        if not in_flight:
            self._enter(State.LOOP, self._clock())

    def looked(self, in_flight: int, *, held: bool) -> None:
        """The loop has launched what can be launched now; `held`: delayed batching, or whose turn it is, holds something back."""
        now = self._clock()
        self.log.end_work(now)
        self.log.note_queues(now)
        if in_flight:
            self._flying()
            return
        state = self._pause(held=held)
        if self._state is State.LOOP:
            self._state = state
        elif self._state is not state:
            self._enter(state, self._woke or now)
        self._woke = 0.0

    def outcome(self, outcome: Outcome, in_flight: int) -> None:
        """A step's outcome has been seen, and `in_flight` are left; to be called before it changes its requests."""
        now = self._clock()
        self._flying()
        if self._flights and self._flights[0].chunks is outcome.chunks:
            flight = self._flights.popleft()
        else:  # launched before the recording began
            flight = self._unknown(outcome.chunks)
        self._steps += 1
        self._alive += sum(outcome.alive)
        self._spend_busy(outcome.seconds, now, flight.prefill > 0)
        self._add_step(flight, now, outcome)
        self._ended = now
        if not in_flight:
            self._enter(State.LOOP, now)
        self.log.end_work(now)
        self.log.begin_work("outcome", now)

    def finish(self) -> Summary:
        """The recording ends now."""
        now = self._clock()
        self.log.note_totals(now)
        self.log.end_work(now)
        if self._woke:
            self._enter(State.LOOP, self._woke)
        if self._state is State.STEP:
            # Nobody knows yet how long it takes; the device is at work.
            flight = self._flights[0] if self._flights else self._unknown(())
            self._spend_busy(now - self._ended, now, flight.prefill > 0)
            self._add_step(flight, now, None)
        self._enter(State.LOOP, now)
        self._flights.clear()
        ordered = sorted(self._latencies) or [0.0]
        return Summary(
            begin=self._begin,
            end=now,
            steps=self._steps,
            tokens=self._stats.tokens - self._tokens,
            alive=self._alive,
            spent={state.value: seconds for state, seconds in self._spent.items()},
            busy=self._busy,
            prefill=self._prefill,
            handoffs=self._handoffs,
            latencies=(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]),
            events=len(self.log),
            dropped=self.log.dropped,
        )

    # States

    def _first_state(self, in_flight: bool) -> State:
        if in_flight:
            return State.STEP
        if self._launching.holding:
            return State.HELD
        # Whether those who are here have no room comes out at the next turn.
        return State.LOOP if self._scheduler.running or self._scheduler.waiting else State.NOTHING

    def _pause(self, *, held: bool) -> State:
        if held:
            return State.HELD
        return State.NO_ROOM if self._scheduler.running or self._scheduler.waiting else State.NOTHING

    def _enter(self, state: State, now: float) -> None:
        """The state ends, and another one begins."""
        self._spent[self._state] += now - self._since
        if self._state is not State.STEP and now > self._since:
            self.log.add(Idle(self._state, self._since, now))
        if state is State.STEP:
            self._ended = now
        self._state, self._since, self._slack, self._woke = state, now, 0.0, 0.0

    def _flying(self) -> None:
        """A step is in flight. One that was on its way when the recording began has been so all the time."""
        if self._state is not State.STEP:
            self._state, self._ended, self._woke = State.STEP, self._since, 0.0

    def _spend_busy(self, seconds: float, now: float, prefill: bool) -> None:
        """The device has worked for so long since the step before; what that one was seen too late may be in it."""
        passed = now - self._ended + self._slack
        busy = min(seconds, passed)
        self._slack = passed - busy
        self._busy += busy
        self._prefill += busy * prefill

    # Steps

    def _flight(self, chunks: Sequence[Chunk], now: float, queued: int) -> _Flight:
        rows = prefill = 0
        arrivals = []
        for chunk in chunks:
            request, count = chunk.request, chunk.count
            rows += count
            unread = request.prompt_length - 1 - chunk.first
            if unread > 0:
                prefill += min(unread, count)
            if request.handoff_sent_ns:
                arrivals.append((request.rid, request.visit_source, request.handoff_sent_ns * 1e-9))
        launching = self._launching
        why = launching.reason
        reason, ready = (why.value, launching.ready) if why else ("none", 0)
        return _Flight(chunks, now, rows, prefill, arrivals, reason, launching.threshold, ready, queued)

    def _unknown(self, chunks: Sequence[Chunk]) -> _Flight:
        """A step that was launched before the recording began."""
        flight = self._flight(chunks, self._ended, 0)
        flight.arrivals, flight.reason, flight.ready = [], "unknown", 0
        return flight

    def _add_step(self, flight: _Flight, end: float, outcome: Outcome | None) -> None:
        begin = max(flight.launched, self._ended)
        alive = leaving = 0
        if outcome is not None:
            alive = sum(outcome.alive)
            leaving = sum([d > 0 for d, lives in zip(outcome.destinations, outcome.alive, strict=True) if lives])
        self.log.add(
            Step(
                launched=flight.launched,
                begin=begin,
                end=end,
                device=outcome.seconds if outcome is not None else 0.0,
                requests=len(flight.chunks),
                rows=flight.rows,
                prefill=flight.prefill,
                arrived=len(flight.arrivals),
                alive=alive,
                leaving=leaving,
                reason=flight.reason,
                threshold=flight.threshold,
                ready=flight.ready,
                queued=flight.queued,
            )
        )
        self._handoffs += len(flight.arrivals)
        for request, source, sent in flight.arrivals:
            self._latencies.append(flight.launched - sent)
            self.log.add(Handoff(request, source, sent, flight.launched, begin))
