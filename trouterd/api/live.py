"""Requests in flight as their HTTP handlers see them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ipc.messages import Sampling, TokenUpdate
from trouterd.api.catalog import Served
from trouterd.api.errors import RequestError


@dataclass(frozen=True, slots=True)
class Job:
    """One choice to generate."""

    prompt: bytes
    """u32 token ids."""
    prompt_tokens: int
    sampling: Sampling
    score: float | None = None
    """Of the prompt, where the route decides by one."""


@dataclass(slots=True, eq=False)
class Generation:
    """One choice at the workers."""

    rid: int
    index: int
    """Position in the answer's `choices`."""
    job: Job
    live: LiveRequest
    received: int = 0
    """Ids seen so far: the next expected sequence number."""
    handoffs: int = 0
    pending_us: int = 0
    last_at: float = 0.0
    """Time of the latest token, CLOCK_MONOTONIC; 0 before the first."""
    over: bool = True
    """No worker holds it: not yet submitted, finished, or told to forget it."""
    settled: bool = False
    """Its outcome has been counted."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One HTTP request and the single future on which its handler waits, whatever the number of choices and tokens.

    A context manager: leaving it aborts whatever still runs.
    """

    request_id: str
    served: Served
    created: float
    """CLOCK_MONOTONIC."""
    close: Callable[[LiveRequest, bool], None]
    """The engine client's: called once, at the end; True when the request failed for other reasons than its client's."""
    generations: Sequence[Generation] = ()
    inbox: deque[tuple[Generation, TokenUpdate]] = field(default_factory=deque)
    error: RequestError | None = None
    active_at: float = 0.0
    """When the handler was last given something, CLOCK_MONOTONIC."""
    waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> LiveRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(self, isinstance(error, Exception) and not isinstance(error, ConnectionError))

    def wake(self) -> None:
        """Let the handler run."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def updates(self) -> list[tuple[Generation, TokenUpdate]]:
        """Everything that has arrived since the last call, in order; waits when there is nothing.

        Empty when nothing arrived for the keep-alive interval.

        Raises:
            RequestError: the request failed; updates that came before have been handed out.
        """
        if not self.inbox and self.error is None:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        self.active_at = time.monotonic()
        if not self.inbox and self.error is not None:
            raise self.error
        batch = list(self.inbox)
        self.inbox.clear()
        return batch
