"""What a trouterd says of itself: totals by model over its control socket, or everything that GET /metrics has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.daemon import Link
from bench.endpoint import Connection
from bench.target import Counters, ModelCounters
from trouterd.batching.report import Step
from trouterd.metrics import PREFIX


def over_control(link: Link, models: Sequence[str]) -> Callable[[], Counters]:
    """Totals of these models by the verb `batching`; for as long as the link is open."""

    def counters() -> Counters:
        shown = link.call("batching")["models"]
        counted = {}
        for name in models:
            if name not in shown or "error" in shown[name]:
                raise RuntimeError(f"model {name}: {shown.get(name, {}).get('error', 'there is none')}")
            own = shown[name]
            counted[name] = ModelCounters(
                tokens=int(own["tokens"]),
                steps=int(own["steps"]),
                step_requests=int(own["step_requests"]),
                busy_seconds=own["busy_seconds"],
                handoffs=int(own["handoffs"]),
            )
        return Counters(max(shown[name]["now"] for name in models), counted)

    return counters


def steps_over_control(link: Link, models: Sequence[str]) -> Callable[[float], dict[str, list[Step]]]:
    """The latest steps of these models by the verb `batching-steps`; nothing where one of them does not answer, since what ran
    beside the others is not known then."""

    def steps(since: float) -> dict[str, list[Step]]:
        shown = link.call("batching-steps", since=since)
        if not all(isinstance(shown.get(name), list) for name in models):
            return {}
        return {name: msgspec.convert(shown[name], list[Step]) for name in models}

    return steps


@dataclass(frozen=True, slots=True)
class Scrape:
    """One page of metrics."""

    now: float
    """When it came, seconds of time.monotonic."""
    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
    """By name without the prefix, and labels in order."""

    @classmethod
    def of(cls, now: float, text: str) -> Scrape:
        """Read a page that came at `now`."""
        samples = {
            (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        }
        return cls(now, samples)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of a metric by one of its labels."""
        sums: dict[str, float] = {}
        for (found, labels), value in self.samples.items():
            if found == name and (key := dict(labels).get(label)) is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples with these labels."""
        return sum(
            value
            for (found, own), value in self.samples.items()
            if found == name and labels.items() <= dict(own).items()
        )

    def counters(self) -> Counters:
        """Totals of all models."""
        tokens, steps = self.by("worker_tokens_total", "model"), self.by("worker_steps_total", "model")
        requests, handoffs = self.by("batch_requests_sum", "model"), self.by("handoffs_total", "src")
        busy = self.by("worker_busy_seconds_total", "model")
        models = {
            name: ModelCounters(
                tokens=int(tokens.get(name, 0)),
                steps=int(count),
                step_requests=int(requests.get(name, 0)),
                busy_seconds=busy.get(name, 0.0),
                handoffs=int(handoffs.get(name, 0)),
            )
            for name, count in steps.items()
        }
        return Counters(self.now, models)


async def page(connection: Connection) -> tuple[float, str] | None:
    """The metrics of a trouterd and when they came, unread: that takes so long that a loop with streams would notice.

    Returns:
        None for other servers.

    Raises:
        EndpointError: no answer.
    """
    response = await connection.ask("GET", "/metrics")
    if response.status != 200 or PREFIX.encode() not in response.body:
        return None
    return time.monotonic(), response.body.decode()
