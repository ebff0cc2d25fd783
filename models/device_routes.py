"""Routing functions on a device: what they see of a step's rows, and how their answers become destinations."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from models.batch import StepOutput
from models.resident import NO_ROUTE, DeviceRoute, RoutedRows
from models.slots import MAX_PARAMS

log = logging.getLogger(__name__)

FAILED = -1
"""Destination of rows whose routing function failed."""
FOREIGN = 1.0
"""Parameters of rows that belong to another route: inside the range of nearly anything, divisors included."""


@dataclass(slots=True)
class RouteInputs:
    """R rows' part of `RoutedRows` that comes from slot records."""

    tokens: torch.Tensor
    """[R] int64"""
    index: torch.Tensor
    """[R] int64, 0 in rows that are not alive."""
    seed: torch.Tensor
    """[R] int64"""
    choice: torch.Tensor
    """[R] int64"""
    params: torch.Tensor
    """[R, MAX_PARAMS] float32, in the order of the row's own route."""
    route: torch.Tensor
    """[R] int32 route of rows that are alive and may leave, NO_ROUTE of all others."""

    @classmethod
    def empty(cls, count: int, device: torch.device) -> RouteInputs:
        """Inputs of `count` rows that have no route."""
        return cls(
            tokens=torch.zeros(count, dtype=torch.int64, device=device),
            index=torch.zeros(count, dtype=torch.int64, device=device),
            seed=torch.zeros(count, dtype=torch.int64, device=device),
            choice=torch.zeros(count, dtype=torch.int64, device=device),
            params=torch.full((count, MAX_PARAMS), FOREIGN, device=device),
            route=torch.full((count,), NO_ROUTE, dtype=torch.int32, device=device),
        )

    def of_route(self, mine: torch.Tensor) -> RouteInputs:
        """The same with parameters of all but `mine` [R] bool replaced."""
        return replace(self, params=self.params.masked_fill(~mine[:, None], FOREIGN))


class RouteError(RuntimeError):
    """A routing function failed, or gave something that is no destination per row."""


def ask(route: DeviceRoute, output: StepOutput, inputs: RouteInputs) -> torch.Tensor:
    """[R] integers: the route's answer for all rows; parameters of other routes' rows have been replaced.

    Raises:
        RouteError: naming the route and what went wrong.
    """
    rows = RoutedRows(
        logits=output.logits,
        hidden=output.hidden,
        tokens=inputs.tokens,
        index=inputs.index,
        seed=inputs.seed,
        choice=inputs.choice,
        params={name: inputs.params[:, place] for place, name in enumerate(route.params)},
    )
    try:
        answer = route.decide(rows)
    except (Exception, SystemExit) as error:  # code of users
        reason = " ".join(str(error).split())
        raise RouteError(f"route '{route.name}': {type(error).__name__}: {reason}") from error
    if answer.shape != inputs.route.shape or answer.is_floating_point() or answer.device != inputs.route.device:
        raise RouteError(
            f"route '{route.name}': {answer.dtype} {list(answer.shape)} on {answer.device} is no destination"
            f" for each of {len(inputs.route)} rows on {inputs.route.device}"
        )
    return answer


def destinations(
    routes: Sequence[DeviceRoute], present: Iterable[int], output: StepOutput, inputs: RouteInputs
) -> torch.Tensor:
    """[R] int32 destinations: each present route's answer in its own rows, 0 elsewhere, FAILED where a function failed."""
    result = torch.zeros_like(inputs.route)
    for number in present:
        mine = inputs.route == number
        try:
            answer = ask(routes[number], output, inputs.of_route(mine))
        except RouteError:
            log.exception("a routing function failed: its requests of this step end with an error")
            answer = torch.full_like(result, FAILED)
        result = torch.where(mine, answer, result).to(torch.int32)
    return result


def works(route: DeviceRoute, output: StepOutput, inputs: RouteInputs) -> bool:
    """Whether the route can be decided from device rows: tried on the rows given. If not, a log line says why."""
    if len(route.params) > MAX_PARAMS:
        log.warning(
            "route '%s' is decided by the host: it has %d numeric parameters, a slot holds %d",
            route.name,
            len(route.params),
            MAX_PARAMS,
        )
        return False
    try:
        ask(route, output, inputs)
    except RouteError as error:
        log.warning("route decided by the host: %s", error)
        return False
    return True
