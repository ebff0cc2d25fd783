"""New tokens on their way out of a worker: to the api from a request's entry, to the entry from a visitor."""

from __future__ import annotations

from ipc.messages import Tokens, TokenUpdate, pack_ids
from trouterd.worker.handoff import Handoffs
from trouterd.worker.outbound import API, Outbound
from trouterd.worker.request import PENDING, Request

UPDATES_PER_MESSAGE = 256
TOKENS_PER_MESSAGE = 8192


class TokenStream:
    """Requests with tokens, or an end, that have not been passed on yet."""

    def __init__(self, index: int, outbound: Outbound, handoffs: Handoffs) -> None:
        self.index = index
        self.outbound = outbound
        self.handoffs = handoffs
        self._news: dict[int, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._news)

    def add(self, request: Request) -> None:
        """The request has news; an ended one may be forgotten everywhere else by now."""
        self._news[request.rid] = request

    def drop(self, rid: int) -> None:
        """Nobody wants a request's news any more."""
        self._news.pop(rid, None)

    def send(self) -> None:
        """Pass on what the rings take; the rest stays."""
        batch: list[Request] = []
        for request in list(self._news.values()):
            if request.is_entry:
                batch.append(request)
            elif request.state is PENDING or self.handoffs.stream(request, self.index):
                # A visitor that left took its tokens along.
                del self._news[request.rid]
        # Many tokens in one message would only pile up while the api does not read.
        part: list[TokenUpdate] = []
        tokens = 0
        for update in map(_update, batch):
            news = len(update.writers)
            if part and (tokens + news > TOKENS_PER_MESSAGE or len(part) == UPDATES_PER_MESSAGE):
                if not self._offer(part):
                    return
                part, tokens = [], 0
            part.append(update)
            tokens += news
        if part:
            self._offer(part)

    def _offer(self, updates: list[TokenUpdate]) -> bool:
        if not self.outbound.offer(API, Tokens(tuple(updates))):
            return False
        for update in updates:
            self._news.pop(update.rid).streamed = update.seq + len(update.writers)
        return True


def _update(request: Request) -> TokenUpdate:
    """What the api has not seen of a request."""
    seq, length, first = request.streamed, request.output_length, request.prompt_length
    return TokenUpdate(
        request.rid,
        seq,
        pack_ids(request.tokens[first + seq : first + length]),
        bytes(request.writers[seq:length]),
        finish=request.finish,
        trim=request.trim,
        handoffs=request.handoffs,
        error=request.error,
        status=request.error_status,
        pending_us=request.pending_ns // 1000,
        forwards=tuple(request.forwards),
        drafted=request.drafted,
        accepted=request.accepted,
    )
