"""What a device is told of the requests in its slots, and which requests it can decode on its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from models.resident import NO_ROUTE, Resident, SlotSetup
from trouterd.worker.device_route import device_route, impurity
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute
from trouterd.worker.scheduler import Chunk

log = logging.getLogger(__name__)

_Told = tuple[int, int, bool]
"""Request id, version of its route's parameters, and whether every token may be routed."""


class SlotSetups:
    """Keeps a resident runner's slots up to date: a request is described when it begins to run and when its route's parameters
    have changed, and not again when it comes back to the slot that it left."""

    def __init__(self, runner: Resident, routes: Iterable[WorkerRoute]) -> None:
        self._runner = runner
        self._routes: dict[str, tuple[int, tuple[str, ...]]] = {}
        """Number and parameter names of the routes that run on the device."""
        self._told: dict[int, _Told] = {}
        """What was told last, per slot."""
        self._prepare([route for route in routes if len(route.workers) > 1])

    def hosted(self, request: Request) -> bool:
        """Whether the device cannot decide this request's tokens."""
        route = request.route
        if len(request.ending_ids) > self._runner.max_stop_ids:
            return True
        if len(route.workers) == 1:
            return False
        _, names = self._routes.get(route.name, (NO_ROUTE, None))
        return names != tuple(route.params)

    def update(self, chunk: Chunk) -> bool:
        """Say what the device needs to know before it runs a chunk whose logits are wanted; whether the algorithm is asked then."""
        request = chunk.request
        version = request.route.version
        told = self._told.get(request.slot)
        if chunk.own:
            # Behind a row that has been launched: whatever that one's token was allowed, this one may be routed.
            if told is not None and told[1] != version:
                self._tell(request, True, version)
            return len(request.route.workers) > 1
        routable = request.may_leave
        if not routable or told != (request.rid, version, True):
            self._tell(request, routable, version)
        return routable

    def _tell(self, request: Request, routable: bool, version: int) -> None:
        self._told[request.slot] = (request.rid, version, routable)
        self._runner.setup(self._describe(request, routable))

    def _describe(self, request: Request, routable: bool) -> SlotSetup:
        sampling, route, given = request.submit.sampling, request.route, request.submit.params
        return SlotSetup(
            slot=request.slot,
            prompt_length=request.prompt_length,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_ids=tuple(sorted(request.ending_ids)),
            temperature=sampling.temperature,
            # Off where it cuts nothing: users may ask for more than 31 bits hold.
            top_k=sampling.top_k if sampling.top_k < self._runner.vocab_size else 0,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            choice=sampling.choice,
            route=self._routes[route.name][0] if len(route.workers) > 1 else NO_ROUTE,
            routable=routable,
            params=tuple(given.get(name, value) for name, value in route.params.items()),
        )

    def _prepare(self, routes: list[WorkerRoute]) -> None:
        pure = []
        for route in routes:
            if reason := impurity(route):
                _warn(route, reason)
            else:
                pure.append(route)
        taken = self._runner.set_routes([device_route(route) for route in pure])
        for number, (route, on_device) in enumerate(zip(pure, taken, strict=True)):
            if on_device:
                self._routes[route.name] = (number, tuple(route.params))
            else:
                _warn(route, "the device does not take it")


def _warn(route: WorkerRoute, reason: str) -> None:
    log.warning(
        "route '%s': the host decides its tokens, and while it has requests here no step is queued behind another one (%s)",
        route.name,
        reason,
    )
