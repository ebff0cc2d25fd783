"""Questions to the code of algorithms, whose faults end the requests of their route and not their batch mates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute

log = logging.getLogger(__name__)

T = TypeVar("T")


def ask(route: WorkerRoute, method: Callable[[T], torch.Tensor], rows: T, count: int) -> list[float] | None:
    """What a method of the route's algorithm answers for each of `count` rows; None where it has no proper answer."""
    try:
        answer = [float(value) for value in method(rows).tolist()]
    except Exception:  # code of users: its faults end the requests of this route, not their batch mates
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
