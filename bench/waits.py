"""How long requests had waited for the launches that took them, as a trouterd's workers counted it between two looks."""

from __future__ import annotations

from bench.counters import Scrape
from bench.percentiles import Percentiles

_METRIC = "wait_seconds"
_ARRIVAL = "arrival"


def waits(before: Scrape, after: Scrape) -> dict[str, Percentiles]:
    """By model: from when a request could take a row to the launch of it, whatever had brought it there."""
    found = {model: _between(before, after, model=model) for model in after.by(f"{_METRIC}_count", "model")}
    return {model: times for model, times in found.items() if times is not None}


def admission(before: Scrape, after: Scrape) -> Percentiles | None:
    """From the arrival of new requests to the launches of their first steps."""
    return _between(before, after, since=_ARRIVAL)


def _between(before: Scrape, after: Scrape, **labels: str) -> Percentiles | None:
    """Of what histograms with these labels have seen between two pages; None of nothing."""
    old, new = _buckets(before, labels), _buckets(after, labels)
    buckets = [(bound, count - old.get(bound, 0.0)) for bound, count in new.items()]
    total = after.total(f"{_METRIC}_sum", **labels) - before.total(f"{_METRIC}_sum", **labels)
    return Percentiles.of_buckets(buckets, total)


def _buckets(page: Scrape, labels: dict[str, str]) -> dict[float, float]:
    """Observations up to a bound, by bound, rising."""
    counts: dict[float, float] = {}
    for (name, found), value in page.samples.items():
        own = dict(found)
        if name == f"{_METRIC}_bucket" and labels.items() <= own.items():
            bound = float(own["le"])
            counts[bound] = counts.get(bound, 0.0) + value
    return dict(sorted(counts.items()))
