"""Which token rows the next step feeds. Knows queues and budgets; pages are the KV cache's business."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from models.kv_cache import KvCache
from trouterd.worker.request import NO_SLOT, PENDING, RUNNING, WAITING, Request

_LOGIT_ROWS = 64


@dataclass(slots=True, init=False)
class Chunk:
    """The next `count` rows of one request."""

    request: Request
    first: int
    """Position of the first row."""
    count: int
    wanted: int
    """Last rows whose logits are wanted: one where the chunk ends with the last token of a request that is here, which gives the
    next one; one more for each draft that is verified."""
    own: bool
    """One row: the token that the device holds for the slot, which may not be known here yet."""
    residency: int
    """The request's when this was planned; a step's word on the chunk counts while they are equal."""
    end: int
    """Position behind the last row."""
    wants_logits: bool
    """Some row's logits are wanted."""

    def __init__(self, request: Request, first: int, count: int, wanted: int, own: bool, residency: int) -> None:
        self.request = request
        self.first = first
        self.count = count
        self.wanted = wanted
        self.own = own
        self.residency = residency
        self.end = first + count
        self.wants_logits = wanted > 0

    @classmethod
    def of(cls, request: Request, count: int, most: int) -> Chunk:
        """As many of the next `count` rows of a request that is here as do with `most` logits."""
        first = request.fed
        if request.chained:
            wanted = 1
        else:
            unwanted = request.first_wanted - first
            wanted = count if unwanted <= 0 else max(0, count - unwanted)
        if wanted > most:
            count -= wanted - most
            wanted = most
        return cls(request, first, count, wanted, request.chained, request.residency)

    @property
    def current(self) -> bool:
        """Nothing has happened to the request that makes this chunk's rows void."""
        return self.residency == self.request.residency


class Scheduler:
    """Continuous batching with mixed decode, extend and prefill rows.

    Order of service in a step: running requests that got nothing in the last one; decode rows, extends of a few tokens and
    prefill chunks of the others; admissions; then, if nobody waits, prefill of visitors that are still with their entry.
    Room is made, in this order, from unreferenced cached pages, from KV of visitors that are away, and by preempting the
    newest running request (recompute). A pending request of this entry is never touched.

    Steps may be in flight: `fed` counts their rows, and pages and slots change hands at once, since whatever those steps still
    read or write comes before the next step's writes on the device.
    """

    def __init__(self, kv: KvCache, max_batch_tokens: int) -> None:
        self.kv = kv
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.away: dict[int, Request] = {}
        """Visitors that are with another model, least recently here first; their KV is what a full pool gives up first."""
        self._cold: dict[int, Request] = {}
        """Those of them whose prompts are to be prefilled."""
        self._overdue: set[int] = set()
        """Running requests that got no row in the last step, for lack of budget or pages."""
        self.hosted: set[int] = set()
        """Requests here whose tokens the host decides."""
        self.short_of_room = False
        """The last plan left a request waiting, or a visitor's prompt unfed, for lack of room."""
        self.preemptions = 0
        self.evictions = 0
        self.looked_up = self.matched = 0
        """Tokens of requests that got a slot, and those of them that the prefix cache had."""
        self._most_logits = max(len(kv.page_table), _LOGIT_ROWS)
        """Rows of a step whose logits are wanted: no more than without drafts, so that logits take no more memory."""
        self._logits_left = 0

    def add(self, request: Request, *, front: bool = False) -> None:
        """A request is here now: new, or back from a peer."""
        request.ready = time.monotonic()
        if not request.is_entry:
            self._not_away(request)
        if request.hosted:
            self.hosted.add(request.rid)
        if request.slot == NO_SLOT:
            request.state = WAITING
            (self.waiting.appendleft if front else self.waiting.append)(request)
            return
        request.state = RUNNING
        self._leave_one_unfed(request)
        self.running.append(request)

    def pend(self, request: Request) -> None:
        """A request is with another model now; its KV stays."""
        self._dequeue(request)
        request.state = PENDING
        # A row of a token that nobody knows here yet is not part of the KV that stays.
        self.rewind(request, len(request.tokens))
        if not request.is_entry:
            self.away[request.rid] = request
            if request.warm:
                self._cold[request.rid] = request

    def remove(self, request: Request) -> None:
        """A request is over, or unknown here from now on: release everything."""
        self._dequeue(request)
        self._not_away(request)
        self.release(request)

    def release(self, request: Request) -> None:
        """Give up a request's KV; published pages stay in the prefix cache."""
        if request.slot != NO_SLOT:
            self.kv.close(request.slot)
            request.slot = NO_SLOT
            # As far as is known: the next plan sees.
            self.short_of_room = False
        request.fed = 0
        request.let_go()

    def set_hosted(self, request: Request, hosted: bool) -> None:
        """From now on the host, or the device again, decides the request's tokens."""
        request.hosted = hosted
        self.hosted.discard(request.rid)
        if hosted and request.state is not PENDING:
            self.hosted.add(request.rid)

    def truncate(self, request: Request) -> None:
        """Drop KV beyond the request's known tokens."""
        self.rewind(request, len(request.tokens))

    def rewind(self, request: Request, length: int) -> None:
        """Keep the KV of positions below `length` only, and let rows in flight go: the next row is fed from here."""
        request.let_go()
        if request.slot != NO_SLOT:
            # Also where nothing is cut: a row that was planned and not launched may have left a page behind.
            request.fed = self.kv.truncate(request.slot, length if length < request.fed else request.fed)

    def plan(self) -> list[Chunk]:
        """The chunks of the next step, empty when there is nothing to do or no room to do it in."""
        budget = self.max_batch_tokens
        chunks: list[Chunk] = []
        planned: set[int] = set()
        self._logits_left = self._most_logits
        self.short_of_room = False
        for request, due in self._service_order():
            if budget == 0:
                break
            # An earlier request of this very loop may have preempted this one.
            if request.state is not RUNNING or request.leaves:
                continue
            chunk = Chunk.of(request, due if due < budget else budget, self._logits_left)
            if chunk.count and (
                self.kv.reserve(request.slot, chunk.end) or self._make_room(request, chunk.end, planned)
            ):
                planned.add(request.rid)
                self._logits_left -= chunk.wanted
                chunks.append(chunk)
                budget -= chunk.count
        budget -= self._admit(chunks, planned, budget)
        if self.waiting:
            self.short_of_room = budget > 0
        else:
            # A warm visitor runs without waiting: it would overtake them.
            self._warm(chunks, budget)
        self._overdue.clear()
        if len(planned) < len(self.running):
            self._overdue.update(r.rid for r in self.running if r.rid not in planned and r.due and not r.leaves)
            self.running.sort(key=lambda r: r.rid not in self._overdue)
        return chunks

    @property
    def wanted(self) -> bool:
        """Something could be fed, if there is room for it: whether there is, `plan` has to tell."""
        # Prompts that are fed may be among the cold ones yet: a turn would be taken for nothing.
        return bool(self.waiting) or self.cold or any(request.due for request in self.running)

    @property
    def cold(self) -> bool:
        """A visitor's prompt is to be prefilled, and nothing is known to be in the way."""
        if self.short_of_room or self.waiting:
            return False
        return any(r.warm and r.fed < r.prompt_length - 1 for r in self._cold.values())

    def blocked_visitor(self) -> Request | None:
        """A visitor that no progress of this worker can make room for: it has to be refused.

        Call it when `plan` came back empty: nothing can run here then, so only returns from peers can free pages, and those
        peers may be waiting for this worker in turn.
        """
        return next((r for r in (*self.waiting, *self.running) if not r.is_entry), None)

    def counts(self) -> dict[str, int]:
        """Requests here by state, this worker's visitors included."""
        return {"waiting": len(self.waiting), "running": len(self.running), "away": len(self.away)}

    def _service_order(self) -> list[tuple[Request, int]]:
        """Running requests and the rows that each could feed: overdue ones, then single decode rows."""
        overdue, single, several = [], [], []
        for request in self.running:
            due = request.due
            if due and request.rid in self._overdue:
                overdue.append((request, due))
            elif due == 1:
                single.append((request, due))
            elif due:
                several.append((request, due))
        return [*overdue, *single, *several]

    def _admit(self, chunks: list[Chunk], planned: set[int], budget: int) -> int:
        """Take requests from the waiting queue while rows and room last; returns the rows used."""
        used = 0
        while self.waiting and used < budget:
            request = self.waiting[0]
            if not (self._has_room(request, planned) and self._open(request, planned)):
                break
            chunk = Chunk.of(request, min(request.unfed, budget - used), self._logits_left)
            # A preempted request must not preempt in turn, or two large ones would evict each other for ever.
            if not chunk.count or not self._make_room(request, chunk.end, planned, preempt=False):
                self.release(request)
                break
            self.waiting.popleft()
            request.state = RUNNING
            self.running.append(request)
            planned.add(request.rid)
            self._logits_left -= chunk.wanted
            chunks.append(chunk)
            used += chunk.count
        return used

    def _warm(self, chunks: list[Chunk], budget: int) -> None:
        """Prefill prompts of visitors that are still with their entry, from free pages only."""
        for request in list(self._cold.values()):
            if budget == 0:
                return
            target = request.prompt_length - 1
            if not request.warm or request.fed >= target:
                del self._cold[request.rid]
                continue
            if request.slot == NO_SLOT and not self._attach(request):
                self.short_of_room = True
                return
            count = min(target - request.fed, budget)
            if count <= 0:
                continue
            if not self.kv.reserve(request.slot, request.fed + count):
                self.short_of_room = True
                continue
            chunks.append(Chunk(request, request.fed, count, 0, False, request.residency))
            budget -= count

    def _has_room(self, request: Request, planned: set[int]) -> bool:
        """Room for the whole request now and one more page for each running one: less would admit only to preempt."""
        needed = request.unfed + self.kv.page_size * len(self.running)
        while self.running and self.kv.free_tokens() < needed:
            if not self._evict_visitor(planned):
                return False
        return True

    def _open(self, request: Request, planned: set[int]) -> bool:
        """Give the request a slot and whatever KV the prefix cache has for it."""
        while not self._attach(request):
            if not self._evict_visitor(planned):
                return False
        return True

    def _attach(self, request: Request) -> bool:
        if request.slot != NO_SLOT:
            return True
        slot = self.kv.open()
        if slot is None:
            return False
        request.slot = slot
        verified = not request.is_entry and request.scores
        request.fed = self.kv.match(slot, request.tokens[: request.settled] if verified else request.tokens)
        self.looked_up += len(request.tokens)
        self.matched += request.fed
        return True

    def _make_room(self, request: Request, length: int, planned: set[int], *, preempt: bool = True) -> bool:
        """Reserve positions below `length`, whoever has to give way."""
        while not self.kv.reserve(request.slot, length):
            # Nobody gives way for a row that will be dead if its request leaves in the step before.
            if length > len(request.tokens):
                return False
            if not (self._evict_visitor(planned) or (preempt and self._preempt(request, planned))):
                return False
        return True

    def _evict_visitor(self, planned: set[int]) -> bool:
        """Drop the KV of the visitor that has been away longest; its ids stay, so that it can be recomputed at its next visit."""
        for request in self.away.values():
            if request.slot != NO_SLOT and request.rid not in planned:
                self.release(request)
                request.warm = False
                self.evictions += 1
                return True
        return False

    def _preempt(self, asking: Request, planned: set[int]) -> bool:
        """Send the newest running request, if newer than the asking one, back to the waiting queue.

        Request ids rise with age, so the oldest request always gets through.
        """
        younger = [r for r in self.running if r.rid > asking.rid and r.rid not in planned]
        if not younger:
            return False
        victim = max(younger, key=lambda r: r.rid)
        self.running.remove(victim)
        self.release(victim)
        self.add(victim, front=True)
        self.preemptions += 1
        return True

    def _not_away(self, request: Request) -> None:
        self.away.pop(request.rid, None)
        self._cold.pop(request.rid, None)

    def _leave_one_unfed(self, request: Request) -> None:
        """A request that is here needs the logits of its last token, so that one must be fed (again); and drafts to be verified."""
        first = request.first_wanted
        if request.fed > first:
            self.rewind(request, first)

    def _dequeue(self, request: Request) -> None:
        self.hosted.discard(request.rid)
        if request.state is RUNNING:
            self.running.remove(request)
        elif request.state is WAITING and request in self.waiting:
            self.waiting.remove(request)
