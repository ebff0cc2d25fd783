"""A request as one worker sees it. Only the decode loop changes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ipc.messages import MODEL_UNKNOWN, PeerReq, Submit, unpack_ids
from trouterd.worker.route import WorkerRoute

NO_SLOT = -1
UNLIKELY = 0.1
"""Share of a route's decisions that keep a request here, below which no row is planned behind the one that decides: it would most
likely be dead, and still be a row of a step that others need."""
NO_TOKEN = -1
GENERATION = 1 << 32
"""Step of `handoff_seq` when the entry takes a request back from a lost peer: larger than any number of hand-offs that can
still be under way, so that whatever the lost peer sends later is stale."""


class State(enum.Enum):
    """Where the request's next token is written, as seen from here."""

    WAITING = "waiting"
    """Here, without a KV slot yet (new, or preempted)."""
    RUNNING = "running"
    """Here, in the batches."""
    PENDING = "pending"
    """With another model; KV kept."""


WAITING, RUNNING, PENDING = State
"""Names for the decode loop: Python 3.11 takes ten times as long for a member of an enumeration as for a global name."""


@dataclass(slots=True, eq=False)
class Request:
    """Ids, KV progress and hand-off bookkeeping of one request on one worker."""

    rid: int
    submit: Submit
    route: WorkerRoute
    entry: int
    """Worker index of the entry."""
    tokens: list[int]
    """Prompt + committed output, then drafts; `known` in the design's words is its length."""
    prompt_length: int
    is_entry: bool
    """This worker is the request's entry."""
    ending_ids: frozenset[int]
    """Ids that end the answer; banned before min_tokens."""
    last_row: int
    """Position of the last row that is fed: it gives the last token of the budget."""
    state: State = PENDING
    fed: int = 0
    """Positions whose K and V are in the pool, or will be when the steps in flight have run."""
    chained: bool = False
    """The device holds the token for position `fed`, or a step in flight gives it: the next row waits for no word from here."""
    page_end: int = 0
    """Length at which the next page for the prefix cache is full; below the KV's length where that is not known."""
    residency: int = 0
    """Rises whenever rows in flight stop to count, whatever their step decides."""
    hosted: bool = False
    """Tokens and destinations are decided by the host: a step with such a row runs alone."""
    slot: int = NO_SLOT
    writers: bytearray = field(default_factory=bytearray)
    """Route index of the writer, per output id."""
    scores: list[float] = field(default_factory=list)
    """One per draft. Drafts are the last ids of `tokens`, not committed yet: at the entry until they are judged and, if they
    travel, come back; at a visitor until they are verified."""
    redo: bool = False
    """Entry: the drafts were dropped by their judge; they do not travel, and are kept in case that the peer does not take over."""
    retries: int = 0
    """Entry: hand-offs of these drafts that a peer had no room for, in a row."""
    forwards: list[int] = field(default_factory=list)
    """Per model of the route: steps with rows of this request, as far as it is known here."""
    drafted: int = 0
    accepted: int = 0
    """Entry: drafts so far, and those of them that were committed."""
    handoff_seq: int = 0
    known: list[int] = field(default_factory=list)
    """Per model of the route: output tokens it knows (MODEL_UNKNOWN: not even the prompt)."""
    stall: int = 0
    handoffs: int = 0
    held: int = NO_TOKEN
    """Rewrite family: the token that was dropped at the hand-off, committed if the peer does not take the request."""
    holder: int = 0
    """Route index of the model that has the request."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """The algorithm's per-request state on this side."""
    streamed: int = 0
    """Entry: output tokens that went to the api; visitor: that went to the entry."""
    stash: list[PeerReq] = field(default_factory=list)
    """Entry: messages that overtook tokens which travel on another ring."""
    handoff_sent_ns: int = 0
    """When the hand-off that brought the request here was sent; 0 once its first step has started."""
    pending_since_ns: int = 0
    pending_ns: int = 0
    arrived_ns: int = 0
    """At its entry, time.monotonic_ns()."""
    ready: float = 0.0
    """Since when it could take a row, time.monotonic(); 0 while a step in flight has its latest one."""
    begun: bool = False
    """Entry: its first step has been launched."""
    warm: bool = False
    """Entry: the peers have been told of the request. Visitor: prefill its prompt while it is still with the entry."""
    visit_source: int = 0
    """Worker index of the sender of the hand-off that brought it here."""
    visit_start: int = 0
    """Output length when the request last came here."""
    finish: str = ""
    trim: int = 0
    error: str = ""
    error_status: int = 500
    """HTTP status that goes with `error`."""

    @classmethod
    def open(cls, submit: Submit, route: WorkerRoute, entry: int, now_ns: int) -> Request:
        """A request that has its prompt and no output."""
        prompt, sampling = unpack_ids(submit.prompt).tolist(), submit.sampling
        ends = frozenset() if sampling.ignore_eos else route.eos_ids
        return cls(
            rid=submit.rid,
            submit=submit,
            route=route,
            entry=entry,
            tokens=prompt,
            prompt_length=len(prompt),
            is_entry=route.side == 0,
            ending_ids=ends.union(sampling.stop_token_ids),
            last_row=len(prompt) + sampling.max_tokens - 2,
            known=[MODEL_UNKNOWN] * len(route.workers),
            forwards=[0] * len(route.workers),
            arrived_ns=now_ns,
        )

    @property
    def output_length(self) -> int:
        """Committed output tokens known here."""
        return len(self.tokens) - self.prompt_length - len(self.scores)

    @property
    def settled(self) -> int:
        """Prompt and committed output tokens."""
        return len(self.tokens) - len(self.scores)

    @property
    def first_wanted(self) -> int:
        """Position from which on rows give logits: that of the last known token; a visitor's drafts are verified behind it."""
        return (len(self.tokens) if self.is_entry else self.settled) - 1

    @property
    def over(self) -> bool:
        """The answer has ended."""
        return bool(self.finish)

    @property
    def unfed(self) -> int:
        """Known tokens that the next steps have to feed; negative where the steps in flight are ahead of what is known."""
        return len(self.tokens) - self.fed

    @property
    def due(self) -> int:
        """Rows that the next step could feed. None behind the row that gives the last token of the budget."""
        if not self.chained:
            return len(self.tokens) - self.fed
        return 1 if self.fed <= self.last_row else 0

    @property
    def uncertain(self) -> bool:
        """A step in flight decides whether the next row counts."""
        return self.chained and self.fed >= len(self.tokens)

    @property
    def leaves(self) -> bool:
        """That step most likely hands the request over: its route's mostly do, and it has not stayed for a token of this visit."""
        return self.uncertain and self.route.stay_rate < UNLIKELY and self.output_length <= self.visit_start

    def let_go(self) -> None:
        """Rows in flight do not count any more, and the next one is fed from here."""
        self.chained = False
        self.residency += 1
        self.page_end = 0

    def append(self, token: int, writer: int) -> None:
        """Commit one output token."""
        self.tokens.append(token)
        self.writers.append(writer)
        self.stall = 0

    def extend(self, tokens: Sequence[int], writers: bytes) -> None:
        """Commit output tokens, with the writer of each."""
        if tokens:
            self.tokens += tokens
            self.writers += writers
            self.stall = 0

    def cut(self, output_length: int) -> None:
        """Forget output tokens from `output_length` on, and all drafts (KV is the caller's business)."""
        del self.tokens[self.prompt_length + output_length :]
        del self.writers[output_length:]
        self.scores.clear()

    def draft(self, token: int, score: float) -> None:
        """Entry: add one draft."""
        self.tokens.append(token)
        self.writers.append(self.route.side)
        self.scores.append(score)
        self.drafted += 1

    def accept(self, count: int) -> None:
        """Commit the first `count` drafts."""
        del self.scores[:count]
        if count:
            self.stall = 0

    def drafts_to_end(self, most: int) -> tuple[int, str, int]:
        """How many of the first `most` drafts can be committed, and what the last one of these ends the answer with."""
        for count in range(most):
            reason, trim = self.finish_reason(self.tokens[self.settled + count], count)
            if reason:
                return count + 1, reason, trim
        return most, "", 0

    @property
    def may_leave(self) -> bool:
        """Whether the algorithm is asked: not where it would drop one more token after `max_stall` hand-offs without progress."""
        route = self.route
        return len(route.workers) > 1 and (route.algorithm.keep_sample or self.stall < route.max_stall)

    def finish_reason(self, token: int, ahead: int = 0) -> tuple[str, int]:
        """What committing `token` behind `ahead` drafts would end the answer with: (reason or '', last ids that are no text)."""
        if token in self.ending_ids:
            return "stop", 1
        if len(self.tokens) - len(self.scores) + ahead > self.last_row:
            return "length", 0
        return "", 0
