"""`trouterctl batching plan`: builds the network from the options, prints what the model says of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from trouterd.batching.bound import ideal
from trouterd.batching.measured import read_step_time
from trouterd.batching.network import Network, NetworkError, StepTime, keep_commit, rewrite_commit
from trouterd.batching.plan import BatchingPlan, plan
from trouterd.batching.survey import Judged, Survey, survey
from trouterd.table import table

EXIT_OK, EXIT_USAGE = 0, 2
_MOST_APART = 2_000
"""Of step times: the throughput model follows the fast model's steps during a slow one."""


@dataclass(frozen=True)
class Costs:
    """What one throughput means for users and for the bill."""

    tokens_per_second: float
    ms_per_token: float
    """From one token of a request to its next, in the mean."""
    gpu_seconds_per_1000_tokens: float
    """Of all GPUs of the deployment, idle or not."""

    @classmethod
    def of(cls, tokens_per_second: float, concurrency: int, gpus: int) -> Costs:
        """For so many requests on so many GPUs."""
        return cls(tokens_per_second, 1e3 * concurrency / tokens_per_second, 1e3 * gpus / tokens_per_second)


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    try:
        network = build_network(options)
    except NetworkError as error:
        sys.stderr.write(f"trouterctl: {error}\n")
        return EXIT_USAGE
    shared = any(network.contention)
    gpus = options.gpus or (1 if shared else network.size)
    found = survey(network, options.concurrency, options.max_batch)
    lists = plan(network, options.concurrency, options.max_batch)
    report = _Report(network, options.concurrency, gpus, found, lists)
    lines = [json.dumps(report.facts())] if options.json else report.lines()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_OK


def build_network(options: argparse.Namespace) -> Network:
    """What the options of `arguments` describe.

    Raises:
        NetworkError: options that do not fit together, or a file that cannot be used.
    """
    if options.context and not options.step:
        raise NetworkError("--context belongs to --step; times of --latency-ms hold at any context")
    if options.step:
        step_times = [read_step_time(path, options.context) for path in options.step]
    else:
        step_times = [StepTime.affine(base / 1e3, more / 1e3) for base, more in options.latency_ms]
    count = len(step_times)
    shortest, longest = min(time.of(1) for time in step_times), max(time.of(options.concurrency) for time in step_times)
    if longest > _MOST_APART * shortest:
        raise NetworkError(
            f"step times: {shortest * 1e3:g} ms for one request and {longest * 1e3:g} ms for {options.concurrency} are more than"
            f" {_MOST_APART:,} times apart"
        )
    if options.p is not None:
        back = 1.0 if options.q is None else options.q
        routing = ((1 - options.p, options.p), (back, 1 - back))
    elif options.q is not None:
        raise NetworkError("--q belongs to --p; with --matrix it is a number of the matrix")
    else:
        routing = options.matrix
    named = {"rewrite": rewrite_commit, "keep": keep_commit}
    commit = named[options.commit](count) if options.commit in named else options.commit
    contention = options.contention * count if len(options.contention) == 1 else options.contention
    return Network(tuple(step_times), routing, commit, contention, handoff=options.handoff_ms / 1e3)


class _Report:
    """One answer, as text or as JSON."""

    def __init__(self, network: Network, concurrency: int, gpus: int, found: Survey, lists: BatchingPlan) -> None:
        self._network, self._concurrency, self._gpus = network, concurrency, gpus
        self._found, self._lists = found, lists
        self._ideal = ideal(network, concurrency) * network.tokens_per_step
        self._slowest = network.slowest(concurrency)
        self._alone = concurrency / network.step_times[self._slowest].of(concurrency)

    def facts(self) -> dict[str, Any]:
        """Everything."""
        return {
            "concurrency": self._concurrency,
            "gpus": self._gpus,
            "shares": self._network.shares,
            "thresholds": [self._row(judged) for judged in self._found.judged],
            "best": self._row(self._found.best),
            "eager": self._row(self._found.eager),
            "ideal_tokens_per_second": self._ideal,
            "slowest_alone": {"model": self._slowest, **asdict(self._costs(self._alone))},
            "lists": self._lists.lists,
        }

    def lines(self) -> Iterable[str]:
        """For people."""
        shares = ", ".join(
            f"{name} {share:.1%}" for name, share in zip(self._network.names, self._network.shares, strict=True)
        )
        yield f"{self._concurrency} requests in flight on {self._gpus} GPU{'s'[: self._gpus > 1]}; share of steps: {shares}"
        yield ""
        head = ("THRESHOLDS", "TOKEN/S", "MS/TOKEN", "GPU-S/1,000 TOKENS", "OF IDEAL", "METHOD", "")
        yield from table(head, [self._cells(judged) for judged in self._found.judged])
        yield ""
        best, eager = self._found.best, self._found.eager
        yield self._sentence("best", best.tokens_per_second, _words(best.thresholds))
        yield self._sentence("eager", eager.tokens_per_second, _words(eager.thresholds))
        yield self._sentence(f"{self._network.names[self._slowest]} alone", self._alone, "without routing")
        yield f"{'ideal':<14} {self._ideal:.1f} token/s: no policy exceeds it"
        yield ""
        for name, thresholds in zip(self._network.names, self._lists.lists, strict=True):
            yield f"B[n] of {name} for n = 1 to {self._concurrency}: {_words(thresholds)}"
        if self._network.size > 2:
            yield "These lists let only the slowest model wait."

    def _costs(self, tokens_per_second: float) -> Costs:
        return Costs.of(tokens_per_second, self._concurrency, self._gpus)

    def _row(self, judged: Judged) -> dict[str, Any]:
        costs = asdict(self._costs(judged.tokens_per_second))
        return {"thresholds": judged.thresholds, **costs, "method": judged.method}

    def _cells(self, judged: Judged) -> tuple[str, ...]:
        costs = self._costs(judged.tokens_per_second)
        return (
            _words(judged.thresholds),
            f"{costs.tokens_per_second:.1f}",
            f"{costs.ms_per_token:.2f}",
            f"{costs.gpu_seconds_per_1000_tokens:.2f}",
            f"{judged.tokens_per_second / self._ideal:.0%}",
            judged.method,
            "best" if judged == self._found.best else "",
        )

    def _sentence(self, what: str, tokens_per_second: float, how: str) -> str:
        costs = self._costs(tokens_per_second)
        return (
            f"{what:<14} {costs.tokens_per_second:.1f} token/s, {costs.ms_per_token:.2f} ms per token,"
            f" {costs.gpu_seconds_per_1000_tokens:.2f} GPU-seconds per 1,000 tokens ({how})"
        )


def _words(thresholds: Iterable[int]) -> str:
    return " ".join(map(str, thresholds))
