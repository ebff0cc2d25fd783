"""What a step's outcome does to its requests: tokens committed, hand-offs sent, answers ended."""

from __future__ import annotations

from collections.abc import Sequence

from ipc.messages import Finish, NackReason
from trouterd.worker.active import ActiveCounts
from trouterd.worker.decision import FAILED, first_writer
from trouterd.worker.drafting import Drafting, Later
from trouterd.worker.handoff import PEER_LOST, Handoffs
from trouterd.worker.outbound import Outbound
from trouterd.worker.registry import Registry
from trouterd.worker.request import NO_TOKEN, PENDING, Request
from trouterd.worker.scheduler import Chunk, Scheduler
from trouterd.worker.stats import Stats
from trouterd.worker.stepper import Outcome
from trouterd.worker.stream import TokenStream


class Outcomes:
    """Commits outcomes and ends requests; called by the decode loop only."""

    def __init__(
        self,
        index: int,
        registry: Registry,
        scheduler: Scheduler,
        handoffs: Handoffs,
        stream: TokenStream,
        outbound: Outbound,
        active: ActiveCounts,
        stats: Stats,
        later: Later,
    ) -> None:
        self.index = index
        self.registry = registry
        self.scheduler = scheduler
        self.handoffs = handoffs
        self.stream = stream
        self.outbound = outbound
        self.active = active
        self.stats = stats
        self.drafting = Drafting(self, later)

    def begin(self, request: Request) -> None:
        """Entry: a new request goes to the model that writes its first token."""
        destination = first_writer(request)
        if destination == FAILED:
            self.fail_one(request)
            return
        if destination and self.handoffs.send(request, request.route.model_at(destination), NO_TOKEN):
            self.handoffs.warm(request)
            return
        self.scheduler.add(request)
        if destination:
            self.not_taken(request, NO_TOKEN)

    def commit(self, outcome: Outcome, now: float) -> None:
        """Apply a step that has ended; what it says of requests that have moved on since its launch is void.

        Args:
            outcome: what it decided.
            now: when it was there, time.monotonic().
        """
        row = -1
        for chunk in outcome.chunks:
            request, wanted = chunk.request, chunk.wants_logits
            row += wanted
            if not chunk.current:
                continue
            if wanted and not outcome.alive[row]:
                # Not by our books, but the device has the last word: feed the row from here.
                self.scheduler.rewind(request, chunk.first)
                request.ready = now
                continue
            request.forwards[request.route.side] += 1
            # Pages with drafts would be cut again, which those in the prefix cache cannot be.
            end = min(chunk.end, request.settled) if request.scores else chunk.end
            if end >= request.page_end:
                self._publish(request, end)
            if wanted:
                if not outcome.stays[row]:
                    self._leave_behind(request, chunk)
                self._decide(request, outcome, row)
            if request.fed <= chunk.end:
                request.ready = now
        self.stats.step(outcome.rows, sum(outcome.alive), outcome.seconds)

    def fail(self, chunks: Sequence[Chunk]) -> None:
        """A step with these chunks failed, or will never be heard of: it ends its requests, not the worker."""
        for chunk in chunks:
            if chunk.current:
                self.fail_one(chunk.request)

    def not_taken(self, request: Request, held: int) -> None:
        """A hand-off failed: go on alone with the held token, or fail the request, by the route's policy."""
        self.stats.fallbacks += 1
        if request.route.on_peer_loss == "fail":
            self.end(request, PEER_LOST, 0)
        elif held != NO_TOKEN:
            self._append(request, held)
        elif request.scores:
            self.drafting.commit(request)

    def refuse(self, request: Request, reason: NackReason) -> None:
        """Visitor: give the request up."""
        self.handoffs.refuse(request, reason)
        self._forget_orphan(request)

    def finish(self, request: Request, reason: str, trim: int, error: str = "") -> None:
        """Entry: the answer is over; pass it on and tell everybody who knows the request."""
        request.finish, request.trim, request.error = reason, trim, error
        self.stream.add(request)
        self.forget(request)
        self.stats.finished[reason] += 1

    def drop(self, requests: Sequence[Request]) -> None:
        """Nobody waits for these any more."""
        for request in requests:
            self.stream.drop(request.rid)
            self.forget(request)

    def forget(self, request: Request) -> None:
        """The request is over here; as its entry, tell the peers."""
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

    def _publish(self, request: Request, fed: int) -> None:
        """Let the prefix cache have the pages that are full."""
        kv = self.scheduler.kv
        kv.commit(request.slot, request.tokens, fed)
        request.page_end = fed - fed % kv.page_size + kv.page_size

    def _leave_behind(self, request: Request, chunk: Chunk) -> None:
        """The device does not go on with the request: a row behind this chunk, queued already, is dead."""
        if request.fed > chunk.end:
            self.scheduler.rewind(request, chunk.end)
        else:
            request.let_go()

    def _decide(self, request: Request, outcome: Outcome, row: int) -> None:
        """Commit the sampled token, hand the request off, or both."""
        token, destination = outcome.tokens[row], outcome.destinations[row]
        keep = request.route.algorithm.keep_sample
        if destination == FAILED:
            self.fail_one(request)
            return
        if request.route.drafts:
            self.drafting.drafted(request, token, outcome.scores[row])
            return
        if request.scores and not self.drafting.verified(request, outcome.accepted[row], token):
            return
        if destination == 0:
            self._append(request, token)
            return
        if keep and self._append(request, token):
            return
        model = request.route.model_at(destination)
        if self.handoffs.send(request, model, NO_TOKEN if keep else token):
            return
        if model == 0:
            # An entry that does not read just now gets the request back as soon as it does.
            self.handoffs.leave(request)
            self._forget_orphan(request)
        else:
            self.not_taken(request, NO_TOKEN if keep else token)

    def _append(self, request: Request, token: int) -> bool:
        """Commit one token written here; True when it ends the answer."""
        reason, trim = request.finish_reason(token)
        request.append(token, request.route.side)
        self.stats.tokens += 1
        self.stream.add(request)
        if reason:
            self.end(request, reason, trim)
        return bool(reason)

    def end(self, request: Request, reason: str, trim: int) -> None:
        """What was committed here, or the route's policy, ends the answer; at its entry at once."""
        if request.is_entry and reason == PEER_LOST:
            request.error_status = 503
            self.finish(request, "error", 0, "a model of the route is not available (on_peer_loss = fail)")
        elif request.is_entry:
            self.finish(request, reason, trim)
        else:
            self.handoffs.leave(request, reason, trim)
            self._forget_orphan(request)

    def fail_one(self, request: Request) -> None:
        """A step with this request's rows failed."""
        if request.is_entry:
            self.finish(
                request,
                "error",
                0,
                "the model or the route's algorithm failed on this answer; the daemon's log says why",
            )
            return
        request.warm = False
        if request.state is not PENDING:
            self.refuse(request, NackReason.ERROR)
        self.scheduler.release(request)

    def _forget_orphan(self, request: Request) -> None:
        """Forget a visitor whose dead entry will never say that it is over: a hop of a third model brought it here later."""
        if self.outbound.is_down(request.entry):
            self.stream.drop(request.rid)
            self.forget(request)
