"""What a worker counts: plain integers in the decode loop, metric families when somebody asks."""

from __future__ import annotations

import time
from collections import Counter, deque

from trouterd.metrics import Family, Histogram, counter, gauge, histogram

MICRO = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds for steps and hand-offs, seconds."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LONGEST_RUN = 4096
"""Steps; longer runs count as so many."""
RECENT = 4096
"""Hand-offs that percentiles are taken over."""


class Stats:
    """Counters of one worker since its start."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        """When they began; of a worker that was started again it is another time."""
        self.steps = 0
        self.tokens = 0
        """Output tokens that this model wrote and committed."""
        self.fed_rows = 0
        self.drafted = 0
        self.accepted = 0
        """Of the drafted tokens, those that became output."""
        self.submitted = 0
        """Requests that entered here."""
        self.finished: Counter[str] = Counter()
        self.handoffs: Counter[tuple[int, int]] = Counter()
        self.runs: Counter[int] = Counter()
        """Hand-offs sent, by the steps that the request took here before."""
        self.handed_at = 0.0
        """time.monotonic() of the last one."""
        self.suffix_tokens = 0
        """Tokens that travelled with hand-offs."""
        self.stale_messages = 0
        self.nacks_sent = 0
        self.refusals = 0
        self.fallbacks = 0
        self.handoff_seconds = Histogram(MICRO)
        """From a hand-off's sending to the start of its first step here."""
        self.recent_handoffs: deque[float] = deque(maxlen=RECENT)
        """The latest of those, in microseconds, for exact percentiles."""
        self.arrival_seconds = Histogram(MICRO)
        """From a request's arrival at its entry to the launch of its first step."""
        self.stay_seconds = Histogram(MICRO)
        """From the end of a step that left a request here to the launch of its next one, whatever was launched without it
        meanwhile; 0 where that was queued before. What a request that gave up its pages is fed again in several steps is in no
        wait."""
        self.step_seconds = Histogram(MICRO)
        self.batch_rows = Histogram(ROWS)
        self.batch_requests = Histogram(ROWS)

    def step(self, rows: int, requests: int, seconds: float) -> None:
        """Count one forward pass of `rows` token rows that gave logits for `requests` requests."""
        self.steps += 1
        self.fed_rows += rows
        self.step_seconds.observe(seconds)
        self.batch_rows.observe(rows)
        self.batch_requests.observe(requests)

    def draft_accepted(self, count: int) -> None:
        """Count drafts of this model that became output."""
        self.accepted += count
        self.tokens += count

    def handoff(self, source: int, target: int, suffix: int, run: int, now_ns: int) -> None:
        """Count one hand-off sent at `now_ns` (CLOCK_MONOTONIC), of `suffix` tokens and after `run` steps."""
        self.handed_at = now_ns * 1e-9
        self.handoffs[source, target] += 1
        if run:  # the request was not sent on at once
            self.runs[run if run < LONGEST_RUN else LONGEST_RUN] += 1
        self.suffix_tokens += suffix

    def handoff_started(self, seconds: float) -> None:
        """Note the latency of one hand-off whose first step starts now."""
        self.handoff_seconds.observe(seconds)
        self.recent_handoffs.append(seconds * 1e6)

    def handoff_us(self) -> dict[str, float]:
        """Median and 99th percentile of the latest hand-offs, microseconds; zero before the first one."""
        ordered = sorted(self.recent_handoffs) or [0.0]
        return {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100]}

    def families(
        self, model: str, models: list[str], live: dict[str, float], totals: dict[str, float], bad_records: int
    ) -> list[Family]:
        """Metric families of this worker.

        Args:
            model: this worker's model, the label of every sample.
            models: model names by worker index.
            live: gauges that are read off the scheduler and the cache, by metric name.
            totals: counts that the scheduler keeps, by metric name.
            bad_records: ring records that were no message of ours.
        """
        own = {"model": model}
        pairs = [({"src": models[s], "dst": models[d]}, n) for (s, d), n in self.handoffs.items()]
        finished = [({**own, "finished_reason": reason}, n) for reason, n in self.finished.items()]
        return [
            counter("worker_steps", "Forward passes.", [(own, self.steps)]),
            counter("worker_rows", "Token rows fed.", [(own, self.fed_rows)]),
            counter("worker_tokens", "Output tokens that this model wrote.", [(own, self.tokens)]),
            counter("worker_drafted", "Tokens written provisionally.", [(own, self.drafted)]),
            counter("worker_accepted", "Provisional tokens that became output.", [(own, self.accepted)]),
            counter("worker_submitted", "Requests that entered here.", [(own, self.submitted)]),
            counter("worker_finished", "Answers that ended at this entry, by reason.", finished),
            counter("handoffs", "Hand-offs sent.", pairs),
            counter("handoff_suffix_tokens", "Token ids that travelled with hand-offs.", [(own, self.suffix_tokens)]),
            counter("stale_peer_msgs", "Late or repeated messages, dropped.", [(own, self.stale_messages)]),
            counter(
                "handoffs_refused",
                "Hand-offs not taken here (unknown: of a request whose earlier tokens are missing) or given back (no_room).",
                [({**own, "reason": "unknown"}, self.nacks_sent), ({**own, "reason": "no_room"}, self.refusals)],
            ),
            counter("handoff_fallbacks", "Hand-offs that nobody took.", [(own, self.fallbacks)]),
            counter("bad_records", "Ring records that are no message.", [(own, bad_records)]),
            histogram("handoff_seconds", "From sending a hand-off to its first step.", [(own, self.handoff_seconds)]),
            histogram(
                "wait_seconds",
                "From when a request could take a row to the launch of it, by what had brought it there.",
                [
                    ({**own, "since": "arrival"}, self.arrival_seconds),
                    ({**own, "since": "handoff"}, self.handoff_seconds),
                    ({**own, "since": "step"}, self.stay_seconds),
                ],
            ),
            histogram(
                "step_seconds", "Duration of a forward pass, sampler and routing included.", [(own, self.step_seconds)]
            ),
            histogram("batch_rows", "Token rows of a step.", [(own, self.batch_rows)]),
            histogram("batch_requests", "Requests that got a token in a step.", [(own, self.batch_requests)]),
            *(counter(name, TOTALS[name], [(own, value)]) for name, value in totals.items()),
            *(gauge(name, GAUGES[name], [(own, value)]) for name, value in live.items()),
        ]


GAUGES = {
    "requests_running": "Requests in the batches.",
    "requests_waiting": "Requests that wait for room.",
    "requests_pending": "Requests of this entry that are with a peer.",
    "requests_away": "Visitors that are with another model.",
    "requests_active": "Active requests of all entries whose route includes this model (n of B[n]).",
    "pages_free": "KV pages that hold nothing.",
    "pages_cached": "KV pages that only the prefix cache holds.",
    "pages_owned": "KV pages of requests.",
    "kv_tokens": "Tokens that the KV pool has room for.",
    "loop_lag_seconds": "How late the event loop was at the last look.",
    "batching_threshold": "Ready requests that launch a step: B for the present number of active ones.",
    "steps_in_flight": "Steps queued on the device whose results have not been read.",
    "messages_unsent": "Messages that wait for room in a ring.",
}
TOTALS = {
    "preemptions": "Running requests sent back to wait.",
    "visitor_evictions": "Visitors whose KV was dropped while they were away.",
    "prefix_tokens": "Tokens of requests that came into the KV pool.",
    "prefix_cached_tokens": "Those of them that the prefix cache had.",
}
