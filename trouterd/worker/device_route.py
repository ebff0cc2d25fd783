"""Routing algorithms in the form in which a device runs them, and which of them can be brought into it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from algorithms.base import StepResult
from models.resident import DeviceRoute, RoutedRows
from trouterd.worker.route import WorkerRoute

log = logging.getLogger(__name__)

_PROBE_ROWS = 3


class StateUsedError(RuntimeError):
    """An algorithm reaches for `StepResult.state`, which a device does not have."""


class _NoState(list[dict[str, Any]]):
    """Stands in for `StepResult.state`."""

    def __getitem__(self, index: object) -> NoReturn:
        raise StateUsedError("state: this algorithm is not pure")

    def __iter__(self) -> Iterator[dict[str, float]]:
        raise StateUsedError("state: this algorithm is not pure")

    def __len__(self) -> int:
        raise StateUsedError("state: this algorithm is not pure")


_NO_STATE = _NoState()


def device_route(route: WorkerRoute) -> DeviceRoute:
    """The route's algorithm as a device calls it."""
    algorithm = route.algorithm

    def decide(rows: RoutedRows) -> torch.Tensor:
        return algorithm.route(_step(rows)).to(torch.int64)

    return DeviceRoute(route.name, decide, tuple(route.params))


def impurity(route: WorkerRoute) -> str:
    """Which promise of `Algorithm.pure` the route's algorithm breaks, found out with tensors that have shapes and no values; ''
    where it keeps all that can be checked."""
    if not route.algorithm.pure:
        return "it is plain Python (pure = False)"
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            answer = route.algorithm.route(_step(_probe(route)))
    except (
        Exception,
        SystemExit,
    ) as error:  # code of users: what it does to real rows is seen and reported where it runs
        log.debug("route '%s' on rows without values", route.name, exc_info=True)
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if not isinstance(answer, torch.Tensor) or answer.shape != (_PROBE_ROWS,):
        return "route() does not give one destination per row"
    return "" if answer.device == route.context.device else f"its destinations are on {answer.device}"


def _probe(route: WorkerRoute) -> RoutedRows:
    context, rows = route.context, _PROBE_ROWS
    device = context.device
    return RoutedRows(
        logits=torch.empty(rows, context.vocab_size, device=device),
        hidden=torch.empty(rows, context.hidden_size, device=device),
        tokens=torch.empty(rows, dtype=torch.int64, device=device),
        index=torch.empty(rows, dtype=torch.int64, device=device),
        seed=torch.empty(rows, dtype=torch.int64, device=device),
        choice=torch.empty(rows, dtype=torch.int64, device=device),
        params={name: torch.empty(rows, device=device) for name in route.params},
    )


def _step(rows: RoutedRows) -> StepResult:
    return StepResult(
        logits=rows.logits,
        hidden=rows.hidden,
        tokens=rows.tokens,
        index=rows.index,
        seed=rows.seed,
        choice=rows.choice,
        params=rows.params,
        state=_NO_STATE,
    )
