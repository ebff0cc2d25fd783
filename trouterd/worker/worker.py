"""The decode loop of one model: applies what has arrived, plans a step, runs it, commits what it decided."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ipc.messages import (
    MODEL_UNKNOWN,
    Abort,
    Active,
    Finish,
    Message,
    Nack,
    NackReason,
    PeerReq,
    Submit,
    Warm,
)
from models.batch import ModelRunner
from models.kv_cache import KvCache
from trouterd.worker.active import ActiveCounts
from trouterd.worker.handoff import Handoffs
from trouterd.worker.outbound import API, Outbound
from trouterd.worker.registry import Registry
from trouterd.worker.request import NO_TOKEN, Request, State
from trouterd.worker.route import WorkerRoute
from trouterd.worker.scheduler import Chunk, Scheduler
from trouterd.worker.stats import Stats
from trouterd.worker.step import FAILED, Outcome, Stepper
from trouterd.worker.stream import TokenStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """Something that the control connection wants done between two steps."""

    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The supervisor's word on another process."""

    index: int
    """Worker index, or API."""
    state: str


Event = Message | Command | ProcessState


class Worker:
    """Owner of all request state of one model.

    Args:
        index: this worker's index.
        routes: every route that this model takes part in, by public name.
        runner: the model.
        kv: its KV cache.
        max_batch_tokens: token rows of one step.
    """

    def __init__(
        self,
        index: int,
        routes: dict[str, WorkerRoute],
        runner: ModelRunner,
        kv: KvCache,
        max_batch_tokens: int,
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
        self.stepper = Stepper(runner, kv.page_table)
        self.handoffs = Handoffs(
            index, self.requests, self.scheduler, self.outbound, self.stats, self._tokens_from_peer
        )
        self.active = ActiveCounts(index, self.outbound)
        self._inbox: deque[Event] = deque()
        self._wake = asyncio.Event()
        self.stream = TokenStream(index, self.outbound, self.handoffs)
        self._closing = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")

    # From the other two loops

    def deliver(self, event: Event) -> None:
        """Hand the decode loop a message or command; applied before its next step."""
        self._inbox.append(event)
        self._wake.set()

    def gauges(self) -> dict[str, float]:
        """What is here right now, by metric name (see `stats.GAUGES`)."""
        queues = self.scheduler.counts()
        pages = self.kv.counts()
        pending = sum(r.is_entry and r.state is State.PENDING for r in self.requests.values())
        return {
            "requests_running": queues["running"],
            "requests_waiting": queues["waiting"],
            "requests_pending": pending,
            "requests_away": queues["away"],
            "requests_active": self.active.total,
            "pages_free": pages["free"],
            "pages_cached": pages["cached"],
            "pages_owned": pages["owned"],
            "messages_unsent": self.outbound.unsent,
        }

    def totals(self) -> dict[str, float]:
        """What has happened since the start, by metric name (see `stats.TOTALS`)."""
        return {"preemptions": self.scheduler.preemptions, "visitor_evictions": self.scheduler.evictions}

    def stop(self) -> None:
        """Let the decode loop end after the step in progress."""
        self._closing = True
        self._wake.set()

    # The loop

    async def run(self) -> None:
        """Decode until `stop`."""
        while not self._closing:
            self._wake.clear()
            self._apply_events()
            chunks = self.scheduler.plan()
            if chunks:
                await self._step(chunks)
            self._pass_on()
            if not chunks and not self._refuse_blocked() and not self._inbox:
                await self._wait()
            else:
                # Ring readers run between steps.
                await asyncio.sleep(0)
        self._thread.shutdown()

    async def _wait(self) -> None:
        """Sleep until something arrives; look again soon while something waits for room in a ring."""
        if not self.stream and not self.outbound.unsent and not self.active.untold:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(0.01):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _step(self, chunks: list[Chunk]) -> None:
        self._note_start(chunks)
        batch = self.stepper.build(chunks)
        wanted = [c.request for c in chunks if c.wants_logits]
        routed = [_may_leave(r) for r in wanted]
        try:
            if self.runner.inline:
                outcome = self.stepper.run(batch, wanted, routed)
            else:
                outcome = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self.stepper.run, batch, wanted, routed
                )
        except Exception:  # the worker's boundary: a failed step ends its requests, not the worker
            log.exception("step of %d rows failed; its %d requests end with an error", len(batch), len(chunks))
            for chunk in chunks:
                self._fail(chunk.request)
            return
        self._commit_step(chunks, outcome)
        self.stats.step(len(batch), len(wanted), outcome.seconds)

    def _note_start(self, chunks: list[Chunk]) -> None:
        now = 0
        for chunk in chunks:
            request = chunk.request
            if request.handoff_sent_ns:
                now = now or time.monotonic_ns()
                self.stats.handoff_started((now - request.handoff_sent_ns) * 1e-9)
                request.handoff_sent_ns = 0
            if request.is_entry and not request.warm and len(request.route.workers) > 1:
                self._warm_peers(request)

    def _warm_peers(self, request: Request) -> None:
        """Tell the peers at admission, so that their prefill overlaps this model's decoding."""
        request.warm = True
        message = Warm(request.submit, self.index)
        for model, worker in enumerate(request.route.workers):
            if worker != self.index and self.outbound.offer(worker, message):
                request.known[model] = 0

    def _commit_step(self, chunks: list[Chunk], outcome: Outcome) -> None:
        row = 0
        for chunk in chunks:
            request = chunk.request
            request.fed += chunk.count
            self.kv.commit(request.slot, request.tokens, request.fed)
            if chunk.wants_logits:
                self._decide(request, outcome.tokens[row], outcome.destinations[row])
                row += 1

    def _decide(self, request: Request, token: int, destination: int) -> None:
        """Commit the sampled token, hand the request off, or both."""
        keep = request.route.algorithm.keep_sample
        if destination == 0:
            self._commit(request, token)
            return
        if destination == FAILED:
            self._fail(request)
            return
        if keep and self._commit(request, token):
            return
        model = request.route.model_at(destination)
        if self.handoffs.send(request, model, NO_TOKEN if keep else token):
            return
        if model == 0:
            # An entry that does not read just now gets the request back as soon as it does.
            self.handoffs.leave(request)
            self._forget_orphan(request)
        else:
            self._not_taken(request, NO_TOKEN if keep else token)

    def _commit(self, request: Request, token: int) -> bool:
        """Append one token written here; True when it ends the answer."""
        reason, trim = request.finish_reason(token)
        request.append(token, request.route.side)
        self.stats.tokens += 1
        self.stream.add(request)
        if not reason:
            return False
        if request.is_entry:
            self._finish(request, reason, trim)
        else:
            self.handoffs.leave(request, reason, trim)
            self._forget_orphan(request)
        return True

    def _not_taken(self, request: Request, held: int) -> None:
        """A hand-off failed: go on alone with the held token, or fail the request, by the route's policy."""
        self.stats.fallbacks += 1
        if request.route.on_peer_loss == "fail" and request.is_entry:
            request.error_status = 503
            self._finish(request, "error", 0, "a model of the route is not available (on_peer_loss = fail)")
        elif held != NO_TOKEN:
            self._commit(request, held)

    def _fail(self, request: Request) -> None:
        """A step with this request's rows failed."""
        if request.is_entry:
            self._finish(request, "error", 0, "the model failed while computing this answer")
            return
        request.warm = False
        if request.state is not State.PENDING:
            self._refuse(request, NackReason.ERROR)
        self.scheduler.release(request)

    def _refuse_blocked(self) -> bool:
        """Refuse a visitor that can never get room here; True when there was one."""
        visitor = self.scheduler.blocked_visitor()
        if visitor is None:
            return False
        self._refuse(visitor, NackReason.FULL)
        return True

    def _refuse(self, request: Request, reason: NackReason) -> None:
        self.handoffs.refuse(request, reason)
        self._forget_orphan(request)

    def _forget_orphan(self, request: Request) -> None:
        """Forget a visitor whose dead entry will never say that it is over: a hop of a third model brought it here later."""
        if self.outbound.is_down(request.entry):
            self.stream.drop(request.rid)
            self._forget(request)

    # Ends

    def _finish(self, request: Request, reason: str, trim: int, error: str = "") -> None:
        """Entry: the answer is over; pass it on and tell everybody who knows the request."""
        request.finish, request.trim, request.error = reason, trim, error
        self.stream.add(request)
        self._forget(request)
        self.stats.finished[reason] += 1

    def _forget(self, request: Request) -> None:
        if not self.registry.close(request):
            return
        self.scheduler.remove(request)
        if request.is_entry:
            several = len(request.route.workers) > 2
            for model, worker in enumerate(request.route.workers):
                if worker == self.index:
                    continue
                # Also to those that seem not to know of it, since a third model may have told them. Without a third one,
                # ends need not pile up for a peer that does not answer.
                if several or request.known[model] >= 0 or self.outbound.available(worker):
                    self.outbound.post(worker, Finish(request.rid))
            self.active.add(request, -1)

    # Events

    def _apply_events(self) -> None:
        inbox = self._inbox
        while inbox:
            event = inbox.popleft()
            match event:
                case PeerReq():
                    self._on_peer_req(event)
                case Submit():
                    self._on_submit(event)
                case Warm():
                    self._on_warm(event)
                case Abort() | Finish():
                    self._on_end(event)
                case Nack():
                    self._on_nack(event)
                case Active():
                    self.active.hear(event)
                case ProcessState():
                    self._on_process_state(event)
                case Command():
                    event.action()
                case _:
                    log.warning("a worker does not take %s", type(event).__name__)

    def _on_submit(self, submit: Submit) -> None:
        request = self.registry.open(submit, self.index)
        if request is None:
            return
        self.active.add(request, +1)
        request.known[0] = 0
        self.stats.submitted += 1
        needed = request.prompt_length + submit.sampling.max_tokens
        if request.prompt_length and needed <= self.kv.max_context:
            self.scheduler.add(request)
        else:
            self._finish(
                request, "error", 0, f"{needed} tokens of prompt and answer; the model takes {self.kv.max_context}"
            )

    def _on_warm(self, warm: Warm) -> None:
        rid = warm.submit.rid
        if rid in self.requests or self.registry.ended(rid) or self.outbound.is_down(warm.entry):
            return
        request = self.registry.open(warm.submit, warm.entry)
        if request is not None:
            request.warm = True
            self.scheduler.pend(request)

    def _on_peer_req(self, message: PeerReq) -> None:
        if message.entry == self.index:
            self.handoffs.resume(message)
            return
        if self.registry.ended(message.rid):
            self.stats.stale_messages += 1
            return
        if message.submit is not None and message.rid not in self.requests:
            self.registry.open(message.submit, message.entry)
        self.handoffs.take(message)

    def _tokens_from_peer(self, request: Request) -> None:
        """Entry: a peer's tokens, and perhaps its end, are in the request."""
        self.stream.add(request)
        if request.over:
            self._finish(request, request.finish, request.trim)
        elif request.state is State.PENDING and not self.outbound.available(request.route.workers[request.holder]):
            # Lost before this word of its new holder came.
            self.handoffs.reclaim(request)
            self._resume_alone(request)

    def _on_end(self, event: Abort | Finish) -> None:
        request = self.requests.get(event.rid)
        if request is None:
            self.registry.note_end(event.rid)
            return
        if request.is_entry:
            self.stats.finished["abort"] += 1
        self.stream.drop(request.rid)
        self._forget(request)

    def _on_nack(self, message: Nack) -> None:
        request = self.handoffs.nacked(message)
        if request is not None:
            self._resume_alone(request)

    def _resume_alone(self, request: Request) -> None:
        self._not_taken(request, self.handoffs.take_back(request))

    def _on_process_state(self, event: ProcessState) -> None:
        self.outbound.set_state(event.index, event.state)
        if event.state == "up":
            return
        if event.index == API:
            if event.state == "down":
                self._drop([r for r in self.requests.values() if r.is_entry])
            return
        lost = [r for r in self.requests.values() if r.is_entry and event.index in r.route.workers]
        for request in lost:
            self._lose_peer(request, event)
        if event.state == "down":
            self.active.forget(event.index)
            self._drop([r for r in self.requests.values() if r.entry == event.index])

    def _lose_peer(self, request: Request, event: ProcessState) -> None:
        model = request.route.workers.index(event.index)
        if event.state == "down":
            request.known[model] = MODEL_UNKNOWN
        # With three models the holder is hearsay: a hop from or to the lost one may be under way, or lost with it.
        if request.state is State.PENDING and (request.holder == model or len(request.route.workers) > 2):
            self.handoffs.reclaim(request)
            self._resume_alone(request)

    def _drop(self, requests: list[Request]) -> None:
        for request in requests:
            self.stream.drop(request.rid)
            self._forget(request)

    # Passing on

    def _pass_on(self) -> None:
        """Send new tokens to the api (entry) or the entry (visitor), and what is left from before."""
        self.outbound.flush()
        if self.stream:
            self.stream.send()
        self.active.tell()


def _may_leave(request: Request) -> bool:
    """Whether the algorithm is asked: not where it would drop one more token after `max_stall` hand-offs without progress."""
    route = request.route
    return len(route.workers) > 1 and (route.algorithm.keep_sample or request.stall < route.max_stall)
