"""Routing step by step: all requests advance in rounds, as the codes that algorithms are published with do it.

In a round the small model takes a step for all requests, the large one then a step for those that were routed to it, and nobody
goes on before. Here a running trouterd does that by its own live settings: its entry model launches when all active requests are
back (`models.X.thresholds`), and models take turns (`batching.overlap`). That is the fair form of this baseline: kernels, graphs,
hand-offs without prefill, HTTP and everything else stay as they are, where published codes have none of most of it, so that the
distance is what asynchrony and delayed batching are worth, and nothing else. It takes no start of another daemon either. A
dispatcher with a barrier over one-token servers would be slower for other reasons: see `bench.std_serving`.

The entry queues no step behind another meanwhile, since not everybody is back; a peer does as long as nobody waits for its turn,
for requests that it most likely keeps. What rounds cannot keep out: a request that arrives is fed its prompt at once, and those
that are ready go along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bench.deployment import Fleet
from bench.target import Target

_NO_LINGER = 60_000
"""Milliseconds: the longest `linger_ms`. A round is far shorter."""


@contextmanager
def step_synchronous(fleet: Fleet, route: str, most: int, *, writes_on: bool = False) -> Iterator[Target]:
    """The daemon steps in rounds inside the block, and launches as before afterwards.

    Args:
        fleet: the daemon.
        route: which requests are measured; others must not be active meanwhile.
        most: active requests at most.
        writes_on: a peer may keep a request for several tokens (R-Stitch), so that nobody waits for all to be back: the models
            take turns, and a round is a turn of each that has requests.
    """
    entry, *peers = fleet.deployment.route(route).models
    everybody = [] if writes_on else list(range(1, most + 1))
    settings: dict[str, Any] = {"batching.mode": "eager", "batching.overlap": False}
    settings |= {f"models.{peer}.thresholds": [] for peer in peers}
    settings |= {f"models.{entry}.thresholds": everybody, f"models.{entry}.linger_ms": _NO_LINGER}
    with fleet.holding(settings), fleet.holding({"batching.mode": "manual"}):
        yield replace(fleet.targets[route], name=f"step-synchronous {route}")
