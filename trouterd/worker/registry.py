"""The requests that a worker knows, and the latest ones that it knew."""

from __future__ import annotations

import asyncio
import logging
import time

from ipc.messages import Submit
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute

log = logging.getLogger(__name__)

ENDED = 4096
"""Ended requests that are remembered."""


class Registry:
    """Requests by id."""

    def __init__(self, routes: dict[str, WorkerRoute]) -> None:
        self.requests: dict[int, Request] = {}
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()
        self._routes = routes
        self._ended: dict[int, None] = {}

    def open(self, submit: Submit, entry: int) -> Request | None:
        """A new request; None for an unknown route or a known id, which only a faulty sender can cause."""
        route = self._routes.get(submit.route)
        if route is None or submit.rid in self.requests:
            log.error("request %d for route %r refused: unknown route or known id", submit.rid, submit.route)
            return None
        request = Request.open(submit, route, entry, time.monotonic_ns())
        self.requests[submit.rid] = request
        self.idle.clear()
        return request

    def close(self, request: Request) -> bool:
        """Forget a request and remember that it has ended; False when it had been forgotten before."""
        if self.requests.pop(request.rid, None) is None:
            return False
        self.note_end(request.rid)
        if not self.requests:
            self.idle.set()
        return True

    def ended(self, rid: int) -> bool:
        """One of the latest to end: a third model's hop may arrive after the end, and is not to bring it back."""
        return rid in self._ended

    def note_end(self, rid: int) -> None:
        """Remember that a request has ended, known here or not."""
        self._ended[rid] = None
        if len(self._ended) > ENDED:
            del self._ended[next(iter(self._ended))]
