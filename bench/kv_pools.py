"""What the KV pools of a trouterd hold: how many requests of a workload at once, and how much of those that come."""

from __future__ import annotations

from bench.counters import Scrape
from bench.endpoint import EndpointError
from bench.workloads import Workload

_SPARE = 32
"""Tokens of two pages: what a request has of its last one, and one that admission keeps free for each."""


class RoomError(EndpointError):
    """So many requests would wait for room, and fewer than that would be under way."""

    def __init__(self, url: str, streams: int, most: int, pool: int) -> None:
        super().__init__(
            url, f"N = {streams}: the smallest KV pool has {pool:,} tokens, which is room for {most} requests"
        )
        self.most = most
        """That have room."""


def check_room(url: str, workload: Workload, streams: int, page: Scrape) -> None:
    """See that all requests fit into the smallest pool, in the mean over their lives.

    Args:
        url: for the message.
        workload: what they ask; the room for a data set's answers is not known.
        streams: how many there are.
        page: metrics; without the sizes of pools nothing is known.

    Raises:
        RoomError: they do not.
    """
    pools = page.by("kv_tokens", "model")
    if not pools or not workload.under_way:
        return
    pool = round(min(pools.values()))
    most = max(0, int((pool - workload.system) / (workload.under_way + _SPARE)))
    if most < streams:
        raise RoomError(url, streams, most, pool)


def cached(before: Scrape, after: Scrape) -> dict[str, float]:
    """Part of the tokens of requests that came into a model's pool between two pages which its prefix cache had, by model."""
    came, had = (
        {name: count - before.by(metric, "model").get(name, 0.0) for name, count in after.by(metric, "model").items()}
        for metric in ("prefix_tokens_total", "prefix_cached_tokens_total")
    )
    return {name: had.get(name, 0.0) / count for name, count in came.items() if count > 0}
