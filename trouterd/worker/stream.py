"""New tokens on their way out of a worker: to the api from a request's entry, to the entry from a visitor."""

from __future__ import annotations

from collections.abc import Iterator

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
        for part in _parts(batch):
            if not self.outbound.offer(API, Tokens(tuple(_update(r) for r in part))):
                return
            for request in part:
                request.streamed = request.output_length
                del self._news[request.rid]


def _parts(batch: list[Request]) -> Iterator[list[Request]]:
    """Groups of requests whose news fit one message: many at once only pile up while the api does not read."""
    part: list[Request] = []
    tokens = 0
    for request in batch:
        news = request.output_length - request.streamed
        if part and (tokens + news > TOKENS_PER_MESSAGE or len(part) == UPDATES_PER_MESSAGE):
            yield part
            part, tokens = [], 0
        part.append(request)
        tokens += news
    if part:
        yield part


def _update(request: Request) -> TokenUpdate:
    """What the api has not seen of a request."""
    seq = request.streamed
    return TokenUpdate(
        rid=request.rid,
        seq=seq,
        ids=pack_ids(request.tokens[request.prompt_length + seq : request.settled]),
        writers=bytes(request.writers[seq : request.output_length]),
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
