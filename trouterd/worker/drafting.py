"""Drafts: judged where they are written, verified where they have travelled to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from algorithms.drafting import Drafter, Drafts, Verdict
from trouterd.worker.request import NO_TOKEN, Request, State

if TYPE_CHECKING:
    from trouterd.worker.outcomes import Outcomes

log = logging.getLogger(__name__)

Later = Callable[[float, Callable[[], None]], None]
"""Has something done between two steps, after so many seconds."""

PAUSES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064, *(0.125,) * 34)
"""Seconds between the attempts to hand drafts to a peer that has no room: some 4 s, then the route's `on_peer_loss` applies."""

_PEER = 1
"""Route index of the only other model."""


class Drafting:
    """What the decode loop does with drafts; called by it only."""

    def __init__(self, outcomes: Outcomes, later: Later) -> None:
        self._outcomes = outcomes
        self._later = later

    # Entry

    def drafted(self, request: Request, token: int, score: float) -> None:
        """One more draft: go on, commit all, or hand over."""
        reason, _ = request.finish_reason(token, len(request.scores))
        request.draft(token, score)
        self._outcomes.stats.drafted += 1
        verdict = _judged(request, bool(reason))
        if verdict in (Verdict.VERIFY, Verdict.DROP) and request.stall >= request.route.max_stall:
            # Nothing of what the peer wrote was taken, again and again.
            verdict = Verdict.ACCEPT
        match verdict:
            case None:
                self._outcomes.fail_one(request)
            case Verdict.ACCEPT:
                self.commit(request)
            case Verdict.VERIFY | Verdict.DROP:
                request.redo = verdict is Verdict.DROP
                request.retries = 0
                self._hand_over(request)

    def commit(self, request: Request) -> None:
        """The drafts are output: their judge says so, or there is no peer for them."""
        count, reason, trim = request.drafts_to_end(len(request.scores))
        request.accept(count)
        request.accepted += count
        self._outcomes.stats.draft_accepted(count)
        self._outcomes.stream.add(request)
        if reason:
            self._outcomes.end(request, reason, trim)

    def pause(self, request: Request, *, give_room: bool) -> None:
        """The peer did not take the drafts. To commit them would give up what the route promises: try again in a while.

        Args:
            request: with drafts.
            give_room: the peer has no pages: it may be full of requests that wait for pages here, so that those of this one go.
        """
        outcomes = self._outcomes
        target = request.route.workers[_PEER]
        if request.retries == len(PAUSES) or not outcomes.outbound.available(target):
            outcomes.not_taken(request, outcomes.handoffs.take_back(request))
            return
        outcomes.handoffs.put_aside(request, _PEER)
        if give_room:
            outcomes.scheduler.release(request)
        number = request.handoff_seq
        self._later(PAUSES[request.retries], lambda: self._retry(request, number))
        request.retries += 1

    def _retry(self, request: Request, number: int) -> None:
        known = self._outcomes.registry.requests.get(request.rid) is request
        if known and request.state is State.PENDING and request.handoff_seq == number:
            self._outcomes.handoffs.take_back(request)
            self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        sent = self._outcomes.handoffs.send(request, _PEER, NO_TOKEN)
        if sent is None:
            self._outcomes.not_taken(request, NO_TOKEN)
        elif not sent:
            self.pause(request, give_room=False)

    # Visitor

    def verified(self, request: Request, accepted: int, token: int) -> bool:
        """So many drafts are accepted; whether this model's own token follows them now."""
        outcomes = self._outcomes
        count, reason, trim = request.drafts_to_end(accepted)
        request.accept(count)
        if count:
            outcomes.stream.add(request)
        if reason:
            outcomes.end(request, reason, trim)
            return False
        if token == NO_TOKEN:
            return False
        if request.scores:
            request.cut(request.output_length)
            outcomes.scheduler.truncate(request)
        return True


def _judged(request: Request, ended: bool) -> Verdict | None:
    """What the algorithm says, None when it fails. An answer that has ended cannot be drafted on."""
    route = request.route
    drafts = Drafts(
        scores=request.scores,
        ids=request.tokens,
        index=request.output_length,
        left=request.submit.sampling.max_tokens - request.output_length - len(request.scores),
        ended=ended,
        params=route.params | request.submit.params,
    )
    try:
        verdict = Verdict(cast(Drafter, route.algorithm).judge(drafts))
    except (Exception, SystemExit):  # code of users: its faults end the requests of this route
        log.exception("route '%s': judge() failed; its request ends with an error", route.name)
        return None
    return Verdict.VERIFY if ended and verdict is Verdict.DRAFT else verdict
