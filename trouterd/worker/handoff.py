"""Hand-offs: which suffix travels, what a receiver takes, and what happens when it does not.

`handoff_seq` orders everything: a hand-off carries a larger number than any before it, tokens that a peer streams carry the
number of the hand-off that gave it the request, and whatever is not newer than the receiver's own number is counted and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ipc.messages import MODEL_UNKNOWN, Abort, Nack, NackReason, PeerReq, Warm, pack_ids, unpack_ids
from trouterd.worker.answers import accepted, combined, suffix_for
from trouterd.worker.outbound import Outbound
from trouterd.worker.request import GENERATION, NO_TOKEN, PENDING, Request
from trouterd.worker.scheduler import Scheduler
from trouterd.worker.stats import Stats

PEER_LOST = "peer_lost"
"""What ends an answer of which a model can write no more, where the route says that it fails then (`on_peer_loss`)."""


class Handoffs:
    """The sending and receiving rules of one worker; called by the decode loop only.

    `on_tokens` is called when the entry has new tokens, or the end, from a peer.
    """

    def __init__(
        self,
        index: int,
        requests: dict[int, Request],
        scheduler: Scheduler,
        outbound: Outbound,
        stats: Stats,
        on_tokens: Callable[[Request], None],
    ) -> None:
        self.index = index
        self.requests = requests
        self.scheduler = scheduler
        self.outbound = outbound
        self.stats = stats
        self.on_tokens = on_tokens

    # Sending

    def warm(self, request: Request) -> None:
        """Entry: tell the peers of a new request, so that their prefill overlaps this model's decoding."""
        request.warm = True
        if not request.route.algorithm.warms_peers:
            return
        message = Warm(request.submit, self.index)
        for model, worker in enumerate(request.route.workers):
            if request.known[model] == MODEL_UNKNOWN and self.outbound.offer(worker, message):
                request.known[model] = 0

    def send(self, request: Request, model: int, held: int) -> bool | None:
        """Hand the request to a model of its route; False when that one cannot be reached and the request stays here, None when it
        stays for a fault of the algorithm.

        Args:
            request: running here.
            model: route index of the receiver.
            held: the dropped sample of the rewrite family, NO_TOKEN in the keep family.
        """
        route, side = request.route, request.route.side
        target = route.workers[model]
        if not self.outbound.available(target):
            return False
        if side != 0 and model != 0 and not self.stream(request, holder=target):
            return False
        length = request.output_length
        suffix = suffix_for(request, model, length)
        if suffix is None:
            return None
        start, loc, payload = suffix
        scores = () if request.redo else tuple(request.scores)
        stop = length + len(scores)
        now = time.monotonic_ns()
        known = request.known.copy()
        known[side] = known[model] = length
        # By keyword only what may be left out: with twenty keywords a struct takes ten times as long.
        message = PeerReq(
            request.rid,
            self.index,
            target,
            request.entry,
            request.handoff_seq + 1,
            start,
            _suffix(request, start, stop),
            length if scores else loc,
            tuple(known),
            bytes(request.writers[start:stop]),
            stall=request.stall + 1,
            handoffs=request.handoffs + 1,
            submit=request.submit if request.known[model] < 0 else None,
            payload=payload,
            scores=scores,
            forwards=tuple(request.forwards),
            sent_ns=now,
        )
        if not self.outbound.offer(target, message):
            return False
        request.handoff_seq += 1
        request.handoffs += 1
        request.stall += 1
        request.known = known
        request.held = held
        request.holder = model
        request.pending_since_ns = now
        self.scheduler.pend(request)
        self.stats.handoff(self.index, target, stop - start, stop - request.visit_start + (held != NO_TOKEN), now)
        return True

    def stream(self, request: Request, holder: int) -> bool:
        """Visitor: send the entry what it has not seen while the request stays with worker `holder`."""
        length, start = request.output_length, request.known[0]
        if start == length and holder == self.index:
            return True
        request.known[0] = length
        message = self._to_entry(request, start, partial=True, destination=holder)
        if self.outbound.offer(request.entry, message):
            return True
        request.known[0] = start
        return False

    def leave(self, request: Request, finish: str = "", trim: int = 0) -> None:
        """Visitor: back to the entry, with the end of the answer or without, as soon as the ring has room."""
        start = request.known[0]
        if request.scores:
            request.cut(request.output_length)
        request.known[0] = request.output_length
        request.handoff_seq += 1
        if not finish:
            request.handoffs += 1
            length = request.output_length
            run = length - request.visit_start
            self.stats.handoff(self.index, request.entry, length - start, run, time.monotonic_ns())
        self.outbound.post(
            request.entry,
            self._to_entry(request, start, partial=False, destination=request.entry, finish=finish, trim=trim),
        )
        self.scheduler.pend(request)

    def refuse(self, request: Request, reason: NackReason) -> None:
        """Visitor: give the request up: to its sender as it came, or to the entry if this visit has written anything."""
        self.stats.refusals += 1
        if request.output_length > request.visit_start:
            # The entry may go on from drafts that are left over; anything else that it wrote would be this model's to write.
            lost = request.route.on_peer_loss == "fail" and not request.scores
            self.leave(request, PEER_LOST if lost else "")
            return
        self.outbound.post(request.visit_source, Nack(request.rid, self.index, request.handoff_seq, reason))
        self.scheduler.pend(request)

    def _to_entry(
        self, request: Request, start: int, *, partial: bool, destination: int, finish: str = "", trim: int = 0
    ) -> PeerReq:
        length = request.output_length
        known = list(request.known)
        known[request.route.side] = length
        return PeerReq(
            request.rid,
            self.index,
            destination,
            request.entry,
            request.handoff_seq,
            start,
            _suffix(request, start, length),
            length,
            tuple(known),
            bytes(request.writers[start:length]),
            partial=partial,
            finish=finish,
            trim=trim,
            stall=request.stall,
            handoffs=request.handoffs,
            forwards=tuple(request.forwards),
            sent_ns=time.monotonic_ns(),
        )

    # Receiving

    def take(self, message: PeerReq) -> Request | None:
        """Visitor: a hand-off has arrived; the request, or None when it was stale or refused.

        A hand-off that takes over from where an older visit was never completed overwrites that visit's own tokens: only
        what the entry holds counts.
        """
        request = self.requests.get(message.rid)
        if request is None or message.start > (length := request.output_length):
            self.stats.nacks_sent += 1
            self.outbound.post(message.source, Nack(message.rid, self.index, message.handoff_seq, NackReason.STALE))
            return None
        if message.handoff_seq <= request.handoff_seq:
            self.stats.stale_messages += 1
            return None
        ids = unpack_ids(message.token_ids).tolist()
        request.handoff_seq = message.handoff_seq
        if request.state is not PENDING:
            # An older visit was never finished.
            self.scheduler.pend(request)
        if message.start < length or request.scores:
            request.cut(message.start)
            self.scheduler.truncate(request)
        if accepted(request, ids, message.payload) < len(ids):
            # The entry has streamed them: a visit cannot go on from anything else.
            self.outbound.post(message.source, Nack(message.rid, self.index, message.handoff_seq, NackReason.ERROR))
            return None
        request.tokens += ids
        request.writers += message.writers
        request.scores += message.scores
        request.forwards = _most(request.forwards, message.forwards)
        length = request.output_length
        request.known = list(message.known)
        request.known[request.route.side] = length
        request.stall = message.stall
        request.handoffs = message.handoffs
        request.holder = request.route.side
        request.held = NO_TOKEN
        request.visit_source = message.source
        request.visit_start = length
        request.handoff_sent_ns = message.sent_ns
        self.scheduler.add(request)
        return request

    def resume(self, message: PeerReq) -> None:
        """Entry: tokens, the request itself, or its end have come from a peer."""
        request = self.requests.get(message.rid)
        if request is None:
            # Aborted or finished meanwhile; whoever still works on it should stop.
            self.stats.stale_messages += 1
            self.outbound.post(message.source, Abort(message.rid))
            return
        if not _fresh(request, message):
            self.stats.stale_messages += 1
            return
        if not request.stash and message.start <= request.output_length:
            self._apply(request, message)
            return
        request.stash.append(message)
        request.stash.sort(key=lambda m: (m.start, m.handoff_seq))
        while request.stash and request.stash[0].start <= request.output_length and not request.over:
            following = request.stash.pop(0)
            if _fresh(request, following):
                self._apply(request, following)
            else:
                self.stats.stale_messages += 1

    def _apply(self, request: Request, message: PeerReq) -> None:
        ids, writers = unpack_ids(message.token_ids).tolist(), message.writers
        if skip := request.output_length - message.start:
            ids, writers = ids[skip:], writers[skip:]
        count = accepted(request, ids, message.payload)
        whole = count == len(ids)
        if whole:
            self._take_in(request, ids, writers, message.partial)
        else:
            self._take_in(request, ids[:count], writers[:count], going_on=False)
        request.forwards = _most(request.forwards, message.forwards)
        length = request.output_length
        request.known = [k if k < length else length for k in message.known]
        request.known[0] = length
        request.handoffs = message.handoffs
        # Also for partial ones: word of an earlier holder that comes later is stale.
        request.handoff_seq = message.handoff_seq
        if ids:
            request.held = NO_TOKEN
        if not whole:
            # The peer may go on from tokens that were not taken.
            self.reclaim(request)
            self._back_here(request)
        elif message.finish:
            request.finish, request.trim = message.finish, message.trim
        elif message.partial:
            request.holder = request.route.workers.index(message.destination)
        else:
            # The way back from a verifier that took or wrote something is no hand-off without progress: the next round is due.
            request.stall = 0 if request.route.drafts and ids else message.stall
            request.visit_source = message.source
            request.handoff_sent_ns = message.sent_ns
            if not self._combine(request, message):
                self._back_here(request)
        self.on_tokens(request)

    def _take_in(self, request: Request, ids: list[int], writers: bytes, going_on: bool) -> None:
        """Commit what came. Drafts that it repeats keep their KV; the others are over at the first difference, or at the end."""
        if not request.scores:
            request.extend(ids, writers)
            return
        drafts = request.tokens[request.settled :]
        same = next(
            (n for n, (a, b) in enumerate(zip(ids, drafts, strict=False)) if a != b), min(len(ids), len(drafts))
        )
        first = request.output_length
        request.writers[first : first + same] = writers[:same]
        request.accept(same)
        own = writers[:same].count(request.route.side)
        request.accepted += own
        self.stats.draft_accepted(own)
        if request.scores and not (going_on and same == len(ids)):
            request.cut(request.output_length)
            self.scheduler.truncate(request)
        request.extend(ids[same:], writers[same:])

    def _combine(self, request: Request, message: PeerReq) -> bool:
        """Write the token that the algorithm makes of a payload, if it makes one; True when that ends the answer."""
        token = combined(request, message.payload) if message.payload else None
        if token is None:
            return False
        request.finish, request.trim = request.finish_reason(token)
        request.append(token, request.route.workers.index(message.source))
        self.stats.tokens += 1
        return request.over

    def nacked(self, message: Nack) -> Request | None:
        """Sender: a hand-off was not taken. Returns the request when it is here again and its held token should be committed."""
        request = self.requests.get(message.rid)
        if request is None or request.state is not PENDING or message.handoff_seq != request.handoff_seq:
            self.stats.stale_messages += 1
            return None
        if message.reason is NackReason.STALE:
            model = request.route.workers.index(message.source)
            request.known[model] = MODEL_UNKNOWN
            if self._resend(request, model):
                return None
        return request

    def _resend(self, request: Request, model: int) -> bool | None:
        """Hand off again, this time with the prompt and all output."""
        held = request.held
        self._back_here(request)
        return self.send(request, model, held)

    def reclaim(self, request: Request) -> None:
        """Entry: take a request back from a peer that is lost; whatever that peer still sends is stale from now on."""
        request.handoff_seq = (request.handoff_seq // GENERATION + 1) * GENERATION
        request.stash.clear()

    def _back_here(self, request: Request) -> None:
        request.holder = request.route.side
        if request.is_entry:
            request.visit_start = request.output_length
        request.pending_ns += time.monotonic_ns() - request.pending_since_ns
        self.scheduler.add(request)

    def put_aside(self, request: Request, model: int) -> None:
        """Entry: the request waits until it can be handed to a model of its route."""
        if request.state is not PENDING:
            request.pending_since_ns = time.monotonic_ns()
            self.scheduler.pend(request)
        request.holder = model

    def take_back(self, request: Request) -> int:
        """The request is here again without a peer's token: returns the held one (or NO_TOKEN) for the caller to commit."""
        held, request.held = request.held, NO_TOKEN
        if request.state is PENDING:
            self._back_here(request)
        return held


def _fresh(request: Request, message: PeerReq) -> bool:
    """A message for the entry that still counts."""
    if request.state is not PENDING or request.over:
        return False
    if message.partial:
        return message.handoff_seq >= request.handoff_seq
    return message.handoff_seq > request.handoff_seq


def _suffix(request: Request, start: int, stop: int) -> bytes:
    """Output ids from `start` to `stop`, drafts included."""
    return pack_ids(request.tokens[request.prompt_length + start : request.prompt_length + stop])


def _most(mine: Sequence[int], told: Sequence[int]) -> list[int]:
    """Counts per model: the later ones, which are the larger ones."""
    return [a if a > b else b for a, b in zip(mine, told, strict=False)] if told else list(mine)
