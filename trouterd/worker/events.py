"""What arrives at a worker from its rings and from the supervisor, applied to its requests between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ipc.messages import MODEL_UNKNOWN, Abort, Active, Finish, Message, Nack, NackReason, PeerReq, Submit, Warm
from trouterd.worker.outbound import API
from trouterd.worker.outcomes import Outcomes
from trouterd.worker.request import PENDING, Request

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


class Events:
    """Applies events; called by the decode loop only."""

    def __init__(self, outcomes: Outcomes, hosted: Callable[[Request], bool]) -> None:
        """
        Args:
            outcomes: whoever ends requests.
            hosted: says of a new request whether the host decides its tokens.
        """
        self.index = outcomes.index
        self.registry = outcomes.registry
        self.requests = outcomes.registry.requests
        self.scheduler = outcomes.scheduler
        self.handoffs = outcomes.handoffs
        self.stream = outcomes.stream
        self.outbound = outcomes.outbound
        self.active = outcomes.active
        self.stats = outcomes.stats
        self.outcomes = outcomes
        self._hosted = hosted

    def apply(self, event: Event) -> None:
        """Do what a message, a command or a process's new state asks for."""
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

    def on_tokens(self, request: Request) -> None:
        """Entry: a peer's tokens, and perhaps its end, are in the request."""
        self.stream.add(request)
        if request.over:
            self.outcomes.end(request, request.finish, request.trim)
        elif request.state is PENDING and not self.outbound.available(request.route.workers[request.holder]):
            # Lost before this word of its new holder came.
            self.handoffs.reclaim(request)
            self._resume_alone(request)

    def _open(self, submit: Submit, entry: int) -> Request | None:
        request = self.registry.open(submit, entry)
        if request is not None:
            request.hosted = self._hosted(request)
        return request

    def _on_submit(self, submit: Submit) -> None:
        request = self._open(submit, self.index)
        if request is None:
            return
        self.active.add(request, +1)
        request.known[0] = 0
        self.stats.submitted += 1
        needed = request.prompt_length + submit.sampling.max_tokens
        longest = self.scheduler.kv.max_context
        if request.prompt_length and needed <= longest:
            self.outcomes.begin(request)
        else:
            problem = f"{needed} tokens of prompt and answer; the model takes {longest}"
            self.outcomes.finish(request, "error", 0, problem)

    def _on_warm(self, warm: Warm) -> None:
        rid = warm.submit.rid
        if rid in self.requests or self.registry.ended(rid) or self.outbound.is_down(warm.entry):
            return
        request = self._open(warm.submit, warm.entry)
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
            self._open(message.submit, message.entry)
        self.handoffs.take(message)

    def _on_end(self, event: Abort | Finish) -> None:
        request = self.requests.get(event.rid)
        if request is None:
            self.registry.note_end(event.rid)
            return
        if request.is_entry:
            self.stats.finished["abort"] += 1
        self.outcomes.drop([request])

    def _on_nack(self, message: Nack) -> None:
        request = self.handoffs.nacked(message)
        if request is None:
            return
        if request.scores and message.reason is not NackReason.ERROR:
            self.outcomes.drafting.pause(request, give_room=message.reason is NackReason.FULL)
        else:
            self._resume_alone(request)

    def _resume_alone(self, request: Request) -> None:
        self.outcomes.not_taken(request, self.handoffs.take_back(request))

    def _on_process_state(self, event: ProcessState) -> None:
        self.outbound.set_state(event.index, event.state)
        if event.state == "up":
            return
        if event.index == API:
            if event.state == "down":
                self.outcomes.drop([r for r in self.requests.values() if r.is_entry])
            return
        lost = [r for r in self.requests.values() if r.is_entry and event.index in r.route.workers]
        for request in lost:
            self._lose_peer(request, event)
        if event.state == "down":
            self.active.forget(event.index)
            self.outcomes.drop([r for r in self.requests.values() if r.entry == event.index])

    def _lose_peer(self, request: Request, event: ProcessState) -> None:
        model = request.route.workers.index(event.index)
        if event.state == "down":
            request.known[model] = MODEL_UNKNOWN
        # With three models the holder is hearsay: a hop from or to the lost one may be under way, or lost with it.
        if request.state is PENDING and (request.holder == model or len(request.route.workers) > 2):
            self.handoffs.reclaim(request)
            self._resume_alone(request)
