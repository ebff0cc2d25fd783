"""The api's end of the links to the workers: submits requests, sorts token updates to them, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ipc.messages import Abort, Message, Submit, Tokens, TokenUpdate
from trouterd.api.catalog import Served
from trouterd.api.errors import RequestError
from trouterd.api.live import Generation, Job, LiveRequest
from trouterd.api.metrics import ApiMetrics
from trouterd.api.workers import WorkerStates
from trouterd.config import Config
from trouterd.control import PeerState

Send = Callable[[str, Message], bool]
"""Worker name, message -> taken; False: the ring and its spill are full."""

RETRY_AFTER = 1
"""Seconds that a refused client is told to wait."""
MIN_TICK = 0.01
"""Seconds between two rounds of periodic work, however short the keep-alive interval."""
FORCE_GRACE = 0.1
"""Seconds that error frames get to reach their clients at the end."""
SERVER_FAULT = 500
"""HTTP statuses from here on are ours, not the client's."""
_EPOCH_SHIFT = 40


class Unfinished(NamedTuple):
    """Choices that a drain did not bring to their ends."""

    cut: int
    """Still running when its time was over."""
    failed: int
    """Ended before with an error that was not the client's, nor the operator's wish."""


class EngineClient:
    """All requests of this process at the workers.

    Args:
        config: limits of [server]; models name the workers.
        send: gives a message to the ring of a worker; never blocks.
        epoch: of this process; request ids of two epochs never meet.
        metrics: shared with the HTTP handlers.
    """

    def __init__(self, config: Config, send: Send, *, epoch: int = 1, metrics: ApiMetrics | None = None) -> None:
        self._send = send
        self._numbers = itertools.count(epoch << _EPOCH_SHIFT)
        self._generations: dict[int, Generation] = {}
        self._lives: dict[LiveRequest, None] = {}
        self._unsent_aborts: deque[tuple[str, int]] = deque()
        self.metrics = metrics or ApiMetrics()
        self.workers = WorkerStates(config.models)
        self.draining = False
        self._drained = asyncio.Event()
        """Set once a drain has been asked for and no request is left."""
        self._failed_draining = 0
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over the live settings of a changed configuration."""
        self.max_active = config.server.max_active_requests
        self._keepalive = config.server.keepalive_interval

    @property
    def active(self) -> int:
        """Choices that the workers hold."""
        return len(self._generations)

    @property
    def tick_interval(self) -> float:
        """Seconds between two calls of `tick` that keep-alive comments need."""
        return min(1.0, max(self._keepalive / 4, MIN_TICK)) if self._keepalive else 1.0

    # Requests

    def submit(
        self, served: Served, jobs: Sequence[Job], *, request_id: str, params: dict[str, float], created: float
    ) -> LiveRequest:
        """Send every choice of a request to the entry worker.

        Args:
            params: overrides of the route's algorithm parameters, already checked.
            created: CLOCK_MONOTONIC when the HTTP request came in.

        Returns:
            The live request; leave it as a context manager.

        Raises:
            RequestError: 429 `overloaded`; 503 while draining, without the needed workers, or when the ring is full.
        """
        self._admit(served, len(jobs))
        live = LiveRequest(request_id=request_id, served=served, created=created, close=self._close)
        live.active_at = time.monotonic()
        live.generations = [
            Generation(rid=next(self._numbers), index=index, job=job, live=live) for index, job in enumerate(jobs)
        ]
        self._lives[live] = None
        try:
            for generation in live.generations:
                self._start(generation, params)
        except RequestError as error:
            live.error = error
            self._close(live, failed=True)
            raise
        self.metrics.prompt_tokens[served.name] += sum(job.prompt_tokens for job in jobs)
        return live

    def _start(self, generation: Generation, params: dict[str, float]) -> None:
        job, served = generation.job, generation.live.served
        submit = Submit(generation.rid, served.name, job.prompt, job.sampling, dict(params), job.score)
        if not self._send(served.entry, submit):
            raise _unavailable(f"worker '{served.entry}' takes no more requests now")
        generation.over = False
        self._generations[generation.rid] = generation
        self.metrics.prompt_length[served.name].observe(job.prompt_tokens)

    def _admit(self, served: Served, count: int) -> None:
        if self.draining:
            raise _unavailable("the daemon is shutting down", code="draining")
        fault = self.workers.fault(served.models if served.needs_peers else served.models[:1])
        if fault:
            raise _unavailable(fault, code="worker_unavailable")
        if self.active + count > self.max_active:
            raise RequestError(
                429,
                "overloaded",
                f"{self.active} of at most {self.max_active} requests are active; retry later",
                retry_after=RETRY_AFTER,
            )

    def settle(self, generation: Generation, reason: str) -> None:
        """Count the outcome of a choice and, if workers still generate for it, stop them. Idempotent."""
        if generation.settled:
            return
        generation.settled = True
        name = generation.live.served.name
        self.metrics.finished[reason, name] += 1
        self.metrics.output_length[name].observe(generation.received)
        self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        if generation.over:
            return
        generation.over = True
        self._generations.pop(generation.rid, None)
        self._abort(generation.live.served.entry, generation.rid)

    def _abort(self, worker: str, rid: int) -> None:
        if not self._send(worker, Abort(rid)):
            self._unsent_aborts.append((worker, rid))

    def _close(self, live: LiveRequest, failed: bool) -> None:
        """The handler is done with a request, or gone."""
        reason = "error" if failed and (live.error is None or live.error.code != "aborted") else "abort"
        if self.draining and reason == "error" and (live.error is None or live.error.status >= SERVER_FAULT):
            self._failed_draining += sum(not generation.settled for generation in live.generations)
        for generation in live.generations:
            self.settle(generation, reason)
        self.metrics.end_to_end[live.served.name].observe(time.monotonic() - live.created)
        del self._lives[live]
        self._check_drained()

    def fail(self, live: LiveRequest, error: RequestError) -> None:
        """End a request with an error: workers forget it, its client is told."""
        if live.error is None:
            live.error = error
        for generation in live.generations:
            self._forget(generation)
        live.wake()

    # From the workers

    def deliver(self, worker: str, message: Message) -> None:
        """Sort one ring record to the requests that it is for."""
        del worker  # request ids are unique over all workers
        if type(message) is not Tokens:
            self.metrics.stale_updates += 1
            return
        now = time.monotonic()
        for update in message.updates:
            generation = self._generations.get(update.rid)
            if generation is None:
                self.metrics.stale_updates += 1
                continue
            fresh: TokenUpdate | None = update
            if update.seq != generation.received:
                fresh = self._reconcile(generation, update)
            if fresh is not None:
                self._accept(generation, fresh, now)

    def _reconcile(self, generation: Generation, update: TokenUpdate) -> TokenUpdate | None:
        """An update out of sequence: what is new in it, if anything. A gap fails the request."""
        repeated = generation.received - update.seq
        if repeated < 0:
            self.fail(generation.live, RequestError(500, "tokens_lost", "tokens of this answer were lost"))
            return None
        self.metrics.stale_updates += 1
        if repeated >= len(update.writers) and not update.finish:
            return None
        return msgspec.structs.replace(
            update, seq=generation.received, ids=update.ids[4 * repeated :], writers=update.writers[repeated:]
        )

    def _accept(self, generation: Generation, update: TokenUpdate, now: float) -> None:
        live = generation.live
        if update.writers:
            self._count(generation, update.writers, now)
        generation.handoffs = update.handoffs
        generation.pending_us = update.pending_us
        if update.finish:
            generation.over = True
            del self._generations[generation.rid]
        failed = update.finish in ("error", "abort")
        if update.ids or (update.finish and not failed):
            # What comes with a failure is text like any other; it is the failure itself that ends the answer.
            live.inbox.append((generation, msgspec.structs.replace(update, finish="") if failed else update))
        if failed:
            self.fail(live, _worker_error(update))
        else:
            live.wake()

    def _count(self, generation: Generation, writers: bytes, now: float) -> None:
        served, count = generation.live.served, len(writers)
        name = served.name
        generation.received += count
        if generation.last_at:
            self.metrics.inter_token[name].observe((now - generation.last_at) / count, count)
        else:
            self.metrics.time_to_first_token[name].observe(now - generation.live.created)
        generation.last_at = now
        self.metrics.generation_tokens[name] += count
        for writer in writers:
            self.metrics.route_tokens[name, served.models[writer]] += 1

    # From the supervisor

    def on_peer_state(self, state: PeerState) -> None:
        """A worker came up, stalled or died; what lived in a dead one ends now."""
        if not self.workers.update(state):
            return
        error = _unavailable(f"worker '{state.name}' was lost, and this request with it", code="worker_lost")
        self._unsent_aborts = deque(entry for entry in self._unsent_aborts if entry[0] != state.name)
        for live in [live for live in self._lives if live.served.entry == state.name]:
            for generation in live.generations:
                generation.over = True  # nobody is left to abort it
                self._generations.pop(generation.rid, None)
            self.fail(live, error)

    async def drain(self, seconds: float | None) -> Unfinished:
        """Take no new requests and wait for the last one to be answered.

        Args:
            seconds: what still runs after that ends with an error; None = wait as long as it takes.

        Returns:
            How many choices were cut off, and how many failed before.
        """
        self.draining = True
        self._check_drained()
        await self._wait_drained(seconds)
        # Now: those that are cut off end with an error, too.
        unfinished = Unfinished(cut=sum(map(_choices_left, self._lives)), failed=self._failed_draining)
        for live in list(self._lives):
            self.fail(live, _unavailable("the daemon is shutting down", code="shutdown"))
        await self._wait_drained(FORCE_GRACE)
        return unfinished

    async def _wait_drained(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._drained.wait()

    def _check_drained(self) -> None:
        if self.draining and not self._lives:
            self._drained.set()

    def abort(self, identifier: str) -> int:
        """End the requests with this request id (as in X-Request-Id or in the answer) or worker request id; how many."""
        names = {identifier, *(identifier.removeprefix(prefix) for prefix in ("chatcmpl-", "cmpl-"))}
        found = [
            live
            for live in self._lives
            if live.request_id in names or any(str(one.rid) == identifier for one in live.generations)
        ]
        for live in found:
            self.fail(live, RequestError(503, "aborted", "the request was aborted by the operator"))
        return len(found)

    def tick(self) -> None:
        """Periodic work: keep-alive of silent requests, aborts that did not fit into a ring."""
        now = time.monotonic()
        for _ in range(len(self._unsent_aborts)):
            self._abort(*self._unsent_aborts.popleft())
        if self._keepalive:
            for live in list(self._lives):
                if now - live.active_at >= self._keepalive:
                    live.wake()

    def report(self) -> list[dict[str, Any]]:
        """Every choice that is in flight, without any text."""
        now = time.monotonic()
        return [
            {
                "rid": one.rid,
                "id": live.request_id,
                "route": live.served.name,
                "choice": one.index,
                "age": round(now - live.created, 3),
                "prompt_tokens": one.job.prompt_tokens,
                "tokens": one.received,
                "handoffs": one.handoffs,
                "state": "finishing" if one.over else "running" if one.received else "waiting",
            }
            for live in self._lives
            for one in live.generations
            if not one.settled
        ]


def _unavailable(message: str, code: str = "unavailable") -> RequestError:
    return RequestError(503, code, message, retry_after=RETRY_AFTER)


def _choices_left(live: LiveRequest) -> int:
    """Choices of a request that its client has not got: those that have not ended, or all, where it does not read them."""
    return sum(not generation.settled for generation in live.generations) or len(live.generations)


def _worker_error(update: TokenUpdate) -> RequestError:
    """What a worker's error or abort means to the client."""
    if update.finish == "abort":
        return RequestError(503, "aborted", update.error or "the request was aborted")
    message = update.error or "the model failed"
    if update.status == 429:
        return RequestError(429, "overloaded", message, retry_after=RETRY_AFTER)
    if update.status == 503:
        return _unavailable(message)
    return RequestError(update.status, "engine_error", message)
