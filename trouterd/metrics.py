"""Metric families as plain structs, so that workers can send theirs over the control link, and their Prometheus text form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

PREFIX = "trouterd_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of latency buckets, seconds."""

FamilyType = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]


class Sample(msgspec.Struct, frozen=True):
    """One line of the exposition; `suffix` is what follows the family's name ('', '_total', '_bucket' ...)."""

    suffix: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """All samples of one metric; `name` is without the prefix and without a counter's `_total`."""

    name: str
    help: str
    type: FamilyType
    samples: list[Sample]


class Histogram:
    """Counts of observations in fixed buckets: plain integers, a few hundred nanoseconds an observation."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def samples(self, labels: Labels) -> list[Sample]:
        """Cumulative buckets, count and sum."""
        lines: list[Sample] = []
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            lines.append(Sample("_bucket", {**labels, "le": bound}, total))
        return [*lines, Sample("_count", dict(labels), total), Sample("_sum", dict(labels), self.sum)]


def counter(name: str, text: str, values: Iterable[tuple[Labels, float]]) -> Family:
    """A counter family from (labels, value) pairs."""
    return Family(name, text, "counter", [Sample("_total", dict(labels), value) for labels, value in values])


def gauge(name: str, text: str, values: Iterable[tuple[Labels, float]]) -> Family:
    """A gauge family from (labels, value) pairs."""
    return Family(name, text, "gauge", [Sample("", dict(labels), value) for labels, value in values])


def histogram(name: str, text: str, values: Iterable[tuple[Labels, Histogram]]) -> Family:
    """A histogram family from (labels, histogram) pairs."""
    lines = [line for labels, observed in values for line in observed.samples(labels)]
    return Family(name, text, "histogram", lines)


class _Collector:
    """What prometheus_client asks for metrics at a scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def merge(families: Iterable[Family]) -> bytes:
    """Families of all processes as one Prometheus text page.

    Families of the same name become one; of two samples with equal labels the counts are added, gauges keep the last.
    """
    merged: dict[str, tuple[Family, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for family in families:
        first, values = merged.setdefault(family.name, (family, {}))
        for sample in family.samples:
            key = (sample.suffix, tuple(sorted(sample.labels.items())))
            previous = 0.0 if first.type == "gauge" else values.get(key, 0.0)
            values[key] = previous + sample.value
    metrics = []
    for first, values in merged.values():
        metric = Metric(PREFIX + first.name, first.help, first.type)
        for (suffix, labels), value in values.items():
            metric.add_sample(metric.name + suffix, dict(labels), value)
        metrics.append(metric)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics))
    return generate_latest(registry)
