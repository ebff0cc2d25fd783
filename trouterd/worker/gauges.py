"""What is in a worker right now, and what has happened in it, by metric name."""

from __future__ import annotations

from trouterd.worker.request import State
from trouterd.worker.worker import Worker


def gauges(worker: Worker) -> dict[str, float]:
    """What is here right now (see `stats.GAUGES`)."""
    queues = worker.scheduler.counts()
    pages = worker.kv.counts()
    pending = sum(r.is_entry and r.state is State.PENDING for r in worker.requests.values())
    return {
        "requests_running": queues["running"],
        "requests_waiting": queues["waiting"],
        "requests_pending": pending,
        "requests_away": queues["away"],
        "requests_active": worker.active.total,
        "pages_free": pages["free"],
        "pages_cached": pages["cached"],
        "pages_owned": pages["owned"],
        "kv_tokens": pages["total"] * worker.kv.page_size,
        "batching_threshold": worker.launching.threshold,
        "messages_unsent": worker.outbound.unsent,
        "steps_in_flight": worker.stepper.in_flight,
    }


def totals(worker: Worker) -> dict[str, float]:
    """What has happened since the start and is counted by none of `stats` (see `stats.TOTALS`)."""
    scheduler = worker.scheduler
    return {
        "preemptions": scheduler.preemptions,
        "visitor_evictions": scheduler.evictions,
        "prefix_tokens": scheduler.looked_up,
        "prefix_cached_tokens": scheduler.matched,
    }
