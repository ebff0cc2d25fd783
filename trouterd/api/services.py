"""What every HTTP handler may use."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeGuard

from aiohttp import web

from trouterd.api.catalog import Catalog
from trouterd.api.engine import EngineClient
from trouterd.api.schema import FieldCensus, Overrides
from trouterd.api.scores import Scores
from trouterd.metrics import Family

CheckParams = Callable[[str, Overrides], Awaitable[dict[str, float]]]
"""Public name, overrides of a request -> the overrides to send; ValueError says which one is wrong."""
WorkerMetrics = Callable[[], Awaitable[list[Family]]]

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Services:
    """Collaborators of the handlers."""

    engine: EngineClient
    catalog: Catalog
    check_params: CheckParams
    scores: Scores
    worker_metrics: WorkerMetrics
    census: FieldCensus
    api_keys: tuple[bytes, ...] = ()


SERVICES = web.AppKey("services", Services)
REQUEST_ID = web.RequestKey("request_id", str)
STARTED = web.RequestKey("started", float)
"""CLOCK_MONOTONIC when the handler began."""


def is_sane_id(value: str | None) -> TypeGuard[str]:
    """A client's request id that can go into headers, logs and answers as it is."""
    return value is not None and _SANE_ID.fullmatch(value) is not None


def new_id() -> str:
    """A request id of our own."""
    return secrets.token_hex(16)
