"""`trouterctl batching plan`: builds the network from the options, prints what the model says of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from trouterd.batching.bound import ideal
from trouterd.batching.costs import Costs
from trouterd.batching.measured import read_step_time
from trouterd.batching.network import Network, NetworkError, StepTime, keep_commit, rewrite_commit
from trouterd.batching.outlook import Outlook, expected
from trouterd.batching.placement import Placement, placed
from trouterd.batching.plan import BatchingPlan, plan
from trouterd.batching.row_time import RowTime, fed, rows_told
from trouterd.batching.survey import Judged, Survey, survey
from trouterd.table import table

EXIT_OK, EXIT_USAGE = 0, 2
_MOST_APART = 2_000
"""Of step times: the throughput model follows the fast model's steps during a slow one."""


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    try:
        network = build_network(options)
        slowest = network.slowest(max(options.concurrency))
        places = [
            placed(network, name, _each(options.contention, network.size), options.gpus, slowest)
            for name in options.placement or ("",)
        ]
    except NetworkError as error:
        sys.stderr.write(f"trouterctl batching plan: error: {error}\n")
        return EXIT_USAGE
    report: Outlook | _Report
    if options.placement or options.price is not None or len(options.concurrency) > 1:
        rows = [
            (place, [expected(place, count, slowest, options.max_batch) for count in options.concurrency])
            for place in places
        ]
        report = Outlook(rows, network.names[slowest], options.price)
    else:
        (place,), (concurrency,) = places, options.concurrency
        found = survey(place.network, concurrency, options.max_batch)
        report = _Report(place, concurrency, found, plan(place.network, concurrency, options.max_batch))
    hopes = _hopes(options)
    told = ("", f"Optimistic: {'; '.join(hopes)}.")
    lines = [json.dumps(report.facts() | {"optimistic": hopes})] if options.json else [*report.lines(), *told]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_OK


def _hopes(options: argparse.Namespace) -> list[str]:
    """What a plan leaves out, in favour of routing and of the large model alone alike or of routing only."""
    found = ["steps that feed prompts are left out"]
    if not options.handoff_ms:
        found.insert(0, "hand-offs take no time (--handoff-ms)")
    if options.step and options.context is None:
        found.insert(0, "steps are those of the shortest context in the files (--context)")
    return found


def build_network(options: argparse.Namespace) -> Network:
    """What the options of `arguments` describe, without contention.

    Raises:
        NetworkError: options that do not fit together, or a file that cannot be used.
    """
    names: tuple[str, ...] = ()
    if options.turns and any(options.contention):
        raise NetworkError("--contention: models that take turns (--turns) never run side by side")
    if options.context and not options.step:
        raise NetworkError("--context belongs to --step; times of --latency-ms hold at any context")
    if options.step:
        measured = [read_step_time(path, options.context) for path in options.step]
        times = [one.time for one in measured]
        names = _distinct([one.model for one in measured])
    else:
        times = [RowTime.affine(*(number / 1e3 for number in numbers)) for numbers in options.latency_ms]
    count = len(times)
    if options.p is not None and count != 2:
        flag = "--step" if options.step else "--latency-ms"
        raise NetworkError(
            f"{flag}: --p is between two models, entry first, and here are {count}; see --matrix for more"
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
    decode = tuple(time.decode for time in times)
    handoff = options.handoff_ms / 1e3
    network = fed(Network(decode, routing, commit, names=names, handoff=handoff, turns=options.turns), times)
    _check_apart(network.step_times, max(options.concurrency))
    return network


def _check_apart(step_times: Sequence[StepTime], most: int) -> None:
    shortest, longest = min(time.of(1) for time in step_times), max(time.of(most) for time in step_times)
    if longest > _MOST_APART * shortest:
        raise NetworkError(
            f"step times: {shortest * 1e3:g} ms for one request and {longest * 1e3:g} ms for {most} are more than"
            f" {_MOST_APART:,} times apart"
        )


def _each(numbers: tuple[float, ...], count: int) -> tuple[float, ...]:
    """One for every model, where one is given for all."""
    return numbers * count if len(numbers) == 1 else numbers


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names; () where one is missing or two are the same, so that models are numbered."""
    return tuple(names) if all(names) and len(set(names)) == len(names) else ()


class _Report:
    """One answer, as text or as JSON."""

    def __init__(self, place: Placement, concurrency: int, found: Survey, lists: BatchingPlan) -> None:
        network = place.network
        self._network, self._concurrency, self._place = network, concurrency, place
        self._found, self._lists = found, lists
        self._ideal = ideal(network, concurrency) * network.tokens_per_step
        self._slowest = network.slowest(concurrency)
        self._alone = concurrency / network.decode_times[self._slowest].of(concurrency)

    def facts(self) -> dict[str, Any]:
        """Everything."""
        return {
            "concurrency": self._concurrency,
            "gpus": self._place.gpus,
            "shares": self._network.shares,
            "rows_per_step": self._network.rows_per_step,
            "thresholds": [self._row(judged) for judged in self._found.judged],
            "best": self._row(self._found.best),
            "eager": self._row(self._found.eager),
            "ideal_tokens_per_second": self._ideal,
            "slowest_alone": {
                "model": self._slowest,
                "gpus": self._place.alone,
                **asdict(Costs.of(self._alone, self._concurrency, self._place.alone)),
            },
            "lists": self._lists.lists,
        }

    def lines(self) -> Iterable[str]:
        """For people."""
        shares = ", ".join(
            f"{name} {share:.1%}" for name, share in zip(self._network.names, self._network.shares, strict=True)
        )
        gpus = self._place.gpus
        where = f"{self._concurrency} requests in flight on {gpus} GPU{'s'[: gpus > 1]}"
        in_turns = "; one model at a time" if self._network.turns else ""
        yield f"{where}; share of steps: {shares}{rows_told(self._network)}{in_turns}"
        yield ""
        head = ("THRESHOLDS", "TOKEN/S", "MS/TOKEN", "GPU-S/1,000 TOKENS", "OF IDEAL", "METHOD", "")
        yield from table(head, [self._cells(judged) for judged in self._found.judged])
        yield ""
        best, eager = self._found.best, self._found.eager
        yield self._sentence("best", best.tokens_per_second, gpus, _words(best.thresholds))
        yield self._sentence("eager", eager.tokens_per_second, gpus, _words(eager.thresholds))
        alone = self._place.alone
        slowest = f"{self._network.names[self._slowest]} alone"
        yield self._sentence(slowest, self._alone, alone, f"without routing, on {alone} GPU{'s'[: alone > 1]}")
        yield f"{'ideal':<14} {self._ideal:.1f} token/s: no policy exceeds it"
        yield ""
        for name, thresholds in zip(self._network.names, self._lists.lists, strict=True):
            yield f"B[n] of {name} for n = 1 to {self._concurrency}: {_words(thresholds)}"
        if self._network.size > 2:
            yield "These lists let only the slowest model wait."

    def _costs(self, tokens_per_second: float) -> Costs:
        return Costs.of(tokens_per_second, self._concurrency, self._place.gpus)

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

    def _sentence(self, what: str, tokens_per_second: float, gpus: int, how: str) -> str:
        costs = Costs.of(tokens_per_second, self._concurrency, gpus)
        return (
            f"{what:<14} {costs.tokens_per_second:.1f} token/s, {costs.ms_per_token:.2f} ms per token,"
            f" {costs.gpu_seconds_per_1000_tokens:.2f} GPU-seconds per 1,000 tokens ({how})"
        )


def _words(thresholds: Iterable[int]) -> str:
    return " ".join(map(str, thresholds))
