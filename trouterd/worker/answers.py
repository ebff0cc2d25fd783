"""Questions to the code of algorithms, whose faults end the requests of their route and not their batch mates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from algorithms.base import OutputView
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute

log = logging.getLogger(__name__)

T = TypeVar("T")


def ask(route: WorkerRoute, method: Callable[[T], torch.Tensor], rows: T, count: int) -> list[float] | None:
    """What a method of the route's algorithm answers for each of `count` rows; None where it has no proper answer."""
    try:
        answer = [float(value) for value in method(rows).tolist()]
    except (Exception, SystemExit):  # code of users: its faults end the requests of this route, not their batch mates
        log.exception("route '%s': %s() failed; its %d requests end with an error", route.name, method.__name__, count)
        return None
    if len(answer) != count:
        log.error("route '%s': %s() gave %d answers for %d rows", route.name, method.__name__, len(answer), count)
        return None
    return answer


def param_rows(members: Sequence[Request], device: torch.device) -> dict[str, torch.Tensor]:
    """The parameters of the members' one route per row, with each request's overrides laid over them."""
    current = members[0].route.params
    count = len(members)
    if not any(r.submit.params for r in members):
        return {
            name: torch.full((count,), value, dtype=torch.float32, device=device) for name, value in current.items()
        }
    return {
        name: torch.tensor([r.submit.params.get(name, value) for r in members], dtype=torch.float32, device=device)
        for name, value in current.items()
    }


def suffix_for(request: Request, model: int, length: int) -> tuple[int, int, bytes] | None:
    """What the algorithm wants to send of a request with `length` output tokens: the fields of a `Handoff`. None when it fails."""
    seen = request.known[model]
    if seen < 0:
        seen = 0
    if request.route.sends_all:
        return seen, length, b""
    try:
        handoff = request.route.algorithm.send(_view(request), model)
        # Conversions, so that a wrong type is a fault of the algorithm here and not of the worker later.
        start, loc, payload = int(handoff.start), int(handoff.loc), bytes(handoff.payload)
    except (Exception, SystemExit):  # code of users: its faults keep the request here
        log.exception("route '%s': send() failed; the request stays", request.route.name)
        return None
    # Neither before the output nor behind a gap, whatever the algorithm says.
    return max(min(start, seen), 0), loc, payload


def accepted(request: Request, ids: list[int], payload: bytes) -> int:
    """How many of the ids that came the algorithm takes; none when it fails."""
    if request.route.accepts_all:
        return len(ids)
    try:
        return max(0, min(int(request.route.algorithm.receive(_view(request), ids, payload)), len(ids)))
    except (Exception, SystemExit):  # code of users: its faults cost tokens of this request only
        log.exception("route '%s': receive() failed; %d tokens are not taken", request.route.name, len(ids))
        return 0


def combined(request: Request, payload: bytes) -> int | None:
    """The token that the algorithm writes without a step; None when it fails: the next step gives one."""
    route = request.route
    try:
        token = route.algorithm.combine(_view(request), payload)
        token = None if token is None else int(token)
    except (Exception, SystemExit):  # code of users: its faults cost a step of this request only
        log.exception("route '%s': combine() failed; the entry writes the token itself", route.name)
        return None
    if token is not None and not 0 <= token < route.context.vocab_size:
        log.error("route '%s': combine() gave %d, which is no token", route.name, token)
        return None
    return token


def _view(request: Request) -> OutputView:
    banned = request.ending_ids if request.output_length < request.submit.sampling.min_tokens else ()
    tokens = request.tokens[: request.settled] if request.scores else request.tokens
    return OutputView(tokens, request.prompt_length, request.known, request.scratch, banned)
