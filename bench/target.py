"""A system under test as a client sees it, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trouterd.batching.report import Step


@dataclass(frozen=True, slots=True)
class ModelCounters:
    """Totals of one model since its start."""

    tokens: int
    steps: int
    step_requests: int
    """Rows of requests over all steps."""
    busy_seconds: float
    handoffs: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of all models at one moment."""

    now: float
    """Seconds, monotonic."""
    models: Mapping[str, ModelCounters]


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers OpenAI requests."""

    name: str
    """In tables: `trouterd routed`, `std serving`."""
    url: str
    """`http://host:port`, or `unix:/path/of.sock`."""
    model: str
    """The `model` of requests."""
    gpus: int
    """That its answers keep busy; what its tokens cost is counted in them."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """More fields of every request."""
    counters: Callable[[], Counters] | None = None
    """None: a foreign server, which says nothing of itself."""
    steps: Callable[[float], Mapping[str, Sequence[Step]]] | None = None
    """The latest steps of each model, those that ended after a moment of the counters' clock; None: not told."""
    large: str = ""
    """Name of the large model among the counters; '' where there is none."""
