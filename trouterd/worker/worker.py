"""The decode loop of one model: applies what has arrived, launches steps, commits what they decided."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext

from ipc.messages import NackReason
from models.batch import ModelRunner
from models.kv_cache import KvCache
from models.resident import is_resident
from trouterd.batching.launch import Reason
from trouterd.config import Route
from trouterd.worker.active import ActiveCounts
from trouterd.worker.events import Command, Event, Events
from trouterd.worker.handoff import Handoffs
from trouterd.worker.inbox import Inbox
from trouterd.worker.launching import Launching
from trouterd.worker.observer import Observer
from trouterd.worker.outbound import Outbound
from trouterd.worker.outcomes import Outcomes
from trouterd.worker.pipeline import PipelinedStepper
from trouterd.worker.recorder import Recorder
from trouterd.worker.registry import Registry
from trouterd.worker.route import WorkerRoute
from trouterd.worker.scheduler import Chunk, Scheduler
from trouterd.worker.stats import Stats
from trouterd.worker.stepper import NEVER, Outcome, Stepper
from trouterd.worker.stream import TokenStream
from trouterd.worker.synchronous import SynchronousStepper
from trouterd.worker.turn import PATIENCE, Turns

log = logging.getLogger(__name__)

WATCH = 0.1
"""Seconds since the last step, or since something arrived, after which a loop that watches sleeps all the same."""
TOGETHER = 16
"""Hand-offs that leave together where the receiver waits for the sender's turn to end, not for them: it takes them in while the
others are made."""


class DeviceLostError(RuntimeError):
    """The model's device answers no more calls: only a new process can use it again, so this one has to end."""


class Worker:
    """Owner of all request state of one model.

    Args:
        index: this worker's index.
        routes: every route that this model takes part in, by public name.
        runner: the model; one that keeps decode state on its device gets several steps in flight.
        kv: its KV cache.
        max_batch_tokens: token rows of one step.
        device_answers: asked after a failed step; False ends the decode loop.
        on_thread: called first in the thread that runs steps.
        watches: stay awake while requests are here or with another model and nothing can be launched: what comes is seen at once,
            and by a processor that has not slept. Takes a core.
    """

    def __init__(
        self,
        index: int,
        routes: dict[str, WorkerRoute],
        runner: ModelRunner,
        kv: KvCache,
        max_batch_tokens: int,
        device_answers: Callable[[], bool] = lambda: True,
        on_thread: Callable[[], None] = lambda: None,
        watches: bool = False,
    ) -> None:
        self.index = index
        self.routes = routes
        self.runner = runner
        self.kv = kv
        self.registry = Registry(routes)
        self.requests = self.registry.requests
        self.idle = self.registry.idle
        """Set while no request is here."""
        self.stats = Stats()
        self.outbound = Outbound()
        self.scheduler = Scheduler(kv, max_batch_tokens)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step", initializer=on_thread)
        self.stepper = _stepper(runner, routes, kv, self._thread)
        self.handoffs = Handoffs(
            index, self.requests, self.scheduler, self.outbound, self.stats, lambda r: self.events.on_tokens(r)
        )
        self.active = ActiveCounts(index, self.outbound)
        self.launching = Launching(self.scheduler, self.active)
        self.observer = Observer(self.stats)
        self.stream = TokenStream(index, self.outbound, self.handoffs)
        self.outcomes = Outcomes(
            index,
            self.registry,
            self.scheduler,
            self.handoffs,
            self.stream,
            self.outbound,
            self.active,
            self.stats,
            self._later,
        )
        self.events = Events(self.outcomes, self.stepper.hosted)
        self.recorder: Recorder | None = None
        """While somebody traces this worker."""
        self._device_answers = device_answers
        self._watches = watches
        self._awake_until = 0.0
        self._inbox = Inbox()
        self.turns = Turns(self._inbox.wake)
        self._closing = False
        self._begun = 0.0
        """When the launch of the step in flight was decided on, if it is the only one; 0 otherwise."""

    # From the other two loops

    def deliver(self, event: Event) -> None:
        """Hand the decode loop a message or command; applied before its next step."""
        self._inbox.put(event)

    def configure(self, route: str, settings: Route) -> None:
        """Put the live part of a route's configuration into force; between two steps only.

        Raises:
            AlgorithmError: a parameter that is out of range; nothing has changed then.
        """
        self.routes[route].configure(settings)
        for request in self.requests.values():
            if request.route.name == route:
                self.scheduler.set_hosted(request, self.stepper.hosted(request))

    @property
    def busy(self) -> bool:
        """A step runs, or is queued."""
        return self.stepper.in_flight > 0 or self.stepper.started > 0

    async def prepare(self, work: Callable[[], None]) -> None:
        """Do something in the thread that runs steps, before the first of them."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def stop(self) -> None:
        """Let the decode loop end after the step in progress."""
        self._closing = True
        self._inbox.wake()

    # The loop

    async def run(self) -> None:
        """Decode until `stop`.

        Raises:
            DeviceLostError: a step failed and the device does not answer any more.
            TurnError: models take turns, and the file that says whose it is cannot be locked any more.
        """
        while not self._closing:
            if self.recorder is not None:
                self.recorder.turn()
            self._take_in()
            again = await self._launch_steps()
            busy, held = self.stepper.in_flight > 0, again < NEVER
            if self.recorder is not None:
                self.recorder.looked(self.stepper.in_flight, held=held)
            # Behind the launch of the next step, which so need not wait for that.
            self._pass_on()
            if busy:
                await self._collect(again)
            else:
                # It came, or was looked for, and is not needed any more, or its step failed.
                self.turns.give_back()
            # A visitor that is held back by delayed batching, or by whose turn it is, is not blocked.
            if not busy and (held or not self._refuse_blocked()) and not self._inbox:
                await self._wait(again)
            else:
                # Ring readers run between steps.
                await asyncio.sleep(0)
        self._pass_on()
        self._thread.shutdown()

    async def _launch_steps(self) -> float:
        """Launch what can be launched now; returns when to try again if nothing happens before."""
        now = time.monotonic()
        self.observer.ready(now)
        self.turns.end(self.stepper.running)
        while True:
            due = self.stepper.launch_at(bool(self.scheduler.hosted))
            if due <= now:
                due = self.launching.due(now, in_flight=self.stepper.in_flight > 0)
            if due > now:
                return due
            if self.turns.taken:
                if not self.scheduler.wanted or (self.stepper.running and self.turns.wanted()):
                    return NEVER
                # Before the plan: requests of one that is not launched would have to stand back in the next.
                fresh = not self.turns.used
                if not self.turns.take(look=self._watches):
                    return now + PATIENCE
                # The one before may have ended since: a step does not begin before its turn.
                now = time.monotonic()
                if fresh:
                    # All that was sent in the turn before is in the rings: one pass of uvloop has their readers run.
                    await asyncio.sleep(0)
                    self._take_in()
                    continue
            chunks = self.scheduler.plan()
            if not chunks or not self.stepper.worthwhile(chunks):
                return NEVER
            await self._launch(chunks, now)
            now = time.monotonic()

    def _take_in(self) -> None:
        """Apply what has arrived."""
        if self._inbox:
            self._awake_until = time.monotonic() + WATCH
        for event in self._inbox.take():
            self.events.apply(event)

    async def _launch(self, chunks: list[Chunk], now: float) -> None:
        if self.recorder is not None:
            self.recorder.launch(chunks, self.stepper.in_flight)
        self._warm_peers(chunks)
        self._begun = 0.0 if self.stepper.in_flight else now
        try:
            await self.stepper.launch(chunks, self._pass_on)
        except Exception as error:  # the worker's boundary: a failed step ends its requests, not the worker
            log.exception("a step of %d requests failed; they end with an error", len(chunks))
            if not self._device_answers():
                raise DeviceLostError("the device answers no more calls after a failed step") from error
            if self.recorder is not None:
                self.recorder.failed(self.stepper.in_flight)
            await self._drain()
            self.outcomes.fail(chunks)
            return
        for chunk in chunks:
            chunk.request.fed = chunk.end
        self._note_start(chunks, now)
        self.launching.launched(chunks, now)

    async def _collect(self, again: float) -> None:
        """Commit the steps that have ended; wait for one, but not longer than until something arrives or `again` comes."""
        outcome = self._poll()
        while outcome is None and self.stepper.in_flight:
            now = time.monotonic()
            if self._inbox or self._closing or now >= again:
                return
            nap = min(self.stepper.nap(now), again - now)
            await (self._inbox.sleep(nap) if nap > 0 else asyncio.sleep(0))
            outcome = self._poll()
        while outcome is not None:
            self._commit(outcome)
            if (outcome := self._poll()) is not None:
                # Tokens of a visitor go to its entry before a hand-off of the next step takes them along.
                self._pass_on()

    async def _drain(self) -> None:
        """Commit what is in flight, so that nobody loses a token to a step that came after it."""
        while self.stepper.in_flight:
            outcome = self._poll()
            if outcome is None:
                await asyncio.sleep(0)
            else:
                self._commit(outcome)

    def _commit(self, outcome: Outcome) -> None:
        if self.recorder is not None:
            self.recorder.outcome(outcome, self.stepper.in_flight)
        now = time.monotonic()
        self._awake_until = now + WATCH
        self.observer.note(outcome, self._begun, now, followed=self.stepper.in_flight > 0)
        # A hand-off that is alone has no others to wait for.
        with self.outbound.together(self._parts) if len(outcome.alive) > 1 else nullcontext():
            self.outcomes.commit(outcome, now)
        running = self.stepper.running
        if self.turns.taken and not running:
            # The step ends with the turn, or it would seem to have run beside the one that begins then.
            self.observer.ready(time.monotonic())
        # At once: whoever has been handed a request is about to ask for its turn.
        self.turns.end(running)

    @property
    def _parts(self) -> int:
        """Messages of a step that leave at a time; 0: all. Nobody starts on the first of several before this turn ends."""
        return TOGETHER if self.turns.taken else 0

    def _poll(self) -> Outcome | None:
        try:
            return self.stepper.poll()
        except Exception as error:
            raise DeviceLostError(f"steps in flight cannot be heard of any more: {error}") from error

    async def _wait(self, until: float) -> None:
        """Sleep or watch until something arrives, at most until then; look again soon while something waits for room in a ring."""
        if self.stream or self.outbound.unsent or self.active.untold:
            until = min(until, time.monotonic() + 0.01)
        if self._closing:
            return
        if self._watches and self.requests:
            awake = min(until, self._awake_until)
            if await self._inbox.watch(awake, self.turns.come) or awake == until:
                return
            self.turns.rest()
        await self._inbox.wait(until)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something between two steps, after a while."""
        asyncio.get_running_loop().call_later(seconds, self.deliver, Command(action))

    def _warm_peers(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            request = chunk.request
            if not request.warm and request.is_entry and len(request.route.workers) > 1:
                self.handoffs.warm(request)

    def _note_start(self, chunks: list[Chunk], now: float) -> None:
        """Count how long those had waited whose step was launched at `now`."""
        latest, stats = 0.0, self.stats
        stayed: dict[float, int] = {}
        for chunk in chunks:
            request = chunk.request
            if request.handoff_sent_ns:
                sent = request.handoff_sent_ns * 1e-9
                latest = max(latest, sent)
                stats.handoff_started(now - sent)
                request.handoff_sent_ns = 0
            elif request.is_entry and not request.begun:
                stats.arrival_seconds.observe(now - request.arrived_ns * 1e-9)
            elif chunk.wants_logits:
                since = request.ready or now
                stayed[since] = stayed.get(since, 0) + 1
            request.begun, request.ready = True, 0.0
        for since, count in stayed.items():
            # A request that was sent back to wait for this very step is ready since after `now`.
            stats.stay_seconds.observe(max(now - since, 0.0), count)
        if latest and self._begun and self.launching.reason is not Reason.LINGER:
            self.observer.awaited(chunks, latest, now)

    def _refuse_blocked(self) -> bool:
        """Refuse a visitor that can never get room here; True when there was one."""
        visitor = self.scheduler.blocked_visitor()
        if visitor is None:
            return False
        self.outcomes.refuse(visitor, NackReason.FULL)
        return True

    def _pass_on(self) -> None:
        """Send new tokens to the api (entry) or the entry (visitor), and what is left from before."""
        self.outbound.flush()
        if self.stream:
            self.stream.send()
        self.active.tell()


def _stepper(runner: ModelRunner, routes: dict[str, WorkerRoute], kv: KvCache, thread: Executor) -> Stepper:
    if not is_resident(runner):
        return SynchronousStepper(runner, kv.page_table, thread)
    kv.on_pages = runner.set_pages
    return PipelinedStepper(runner, routes.values(), kv.page_table, thread)
