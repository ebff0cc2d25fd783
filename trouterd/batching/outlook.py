"""A plan for several numbers of requests and placements side by side: what to expect of each, before anyone rents the GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trouterd.batching.bound import ideal
from trouterd.batching.costs import Costs
from trouterd.batching.placement import Placement
from trouterd.batching.row_time import rows_told
from trouterd.batching.survey import Judged, survey
from trouterd.table import table


@dataclass(frozen=True)
class Expected:
    """Of one number of requests in one placement."""

    concurrency: int
    best: Judged
    eager: Judged
    ideal: float
    """Tokens/s that no policy exceeds."""
    alone: float
    """Tokens/s of the slowest model without routing."""


def expected(placement: Placement, concurrency: int, slowest: int, max_batch: int | None) -> Expected:
    """What the throughput model says.

    Args:
        placement: of the models.
        concurrency: requests in flight.
        slowest: the model that routing is compared with.
        max_batch: the largest threshold.
    """
    network = placement.network
    found = survey(network, concurrency, max_batch)
    return Expected(
        concurrency,
        found.best,
        found.eager,
        ideal(network, concurrency) * network.tokens_per_step,
        concurrency / network.decode_times[slowest].of(concurrency),
    )


class Outlook:
    """The answer, as text or as JSON.

    Args:
        rows: what is expected, by placement, in order.
        slowest: name of the model that routing is compared with.
        price: of an hour of one GPU; None: costs are told in GPU-seconds alone.
    """

    def __init__(self, rows: Sequence[tuple[Placement, Sequence[Expected]]], slowest: str, price: float | None) -> None:
        self._rows, self._slowest, self._price = rows, slowest, price

    def facts(self) -> dict[str, Any]:
        """Everything."""
        return {
            "large_only": self._slowest,
            "placements": [
                {
                    "placement": placement.name,
                    "gpus": placement.gpus,
                    "gpus_of_large_only": placement.alone,
                    "contention": placement.network.contention,
                    "turns": placement.network.turns,
                    "shares": placement.network.shares,
                    "rows_per_step": placement.network.rows_per_step,
                    "expected": [self._facts(placement, one) for one in found],
                }
                for placement, found in self._rows
            ],
        }

    def _facts(self, placement: Placement, one: Expected) -> dict[str, Any]:
        def costs(tokens_per_second: float, gpus: int) -> dict[str, float]:
            found = Costs.of(tokens_per_second, one.concurrency, gpus)
            money = {} if self._price is None else {"money_per_1000000_tokens": found.money(self._price)}
            return asdict(found) | money

        best, alone = costs(one.best.tokens_per_second, placement.gpus), costs(one.alone, placement.alone)
        return {
            "concurrency": one.concurrency,
            "thresholds": one.best.thresholds,
            "method": one.best.method,
            **best,
            "eager_tokens_per_second": one.eager.tokens_per_second,
            "ideal_tokens_per_second": one.ideal,
            "large_only": alone,
            "speed_up": one.best.tokens_per_second / one.alone,
            "cost_ratio": best["gpu_seconds_per_1000_tokens"] / alone["gpu_seconds_per_1000_tokens"],
        }

    def lines(self) -> Iterable[str]:
        """For people."""
        for placement, found in self._rows:
            yield _title(placement)
            yield ""
            yield from table(self._head(), [self._cells(placement, one) for one in found])
            yield ""
        yield f"x {self._slowest}: against {self._slowest} without routing on its own GPUs, in token/s and in cost"

    def _head(self) -> tuple[str, ...]:
        money = () if self._price is None else ("PER 1M TOKENS",)
        costs = ("TOKEN/S", "MS/TOKEN", "GPU-S/1,000 TOKENS", *money)
        return ("REQUESTS", "THRESHOLDS", *costs, f"X {self._slowest}".upper(), "X COST", "EAGER TOKEN/S", "OF IDEAL")

    def _cells(self, placement: Placement, one: Expected) -> tuple[str, ...]:
        costs = Costs.of(one.best.tokens_per_second, one.concurrency, placement.gpus)
        alone = Costs.of(one.alone, one.concurrency, placement.alone)
        money = () if self._price is None else (f"{costs.money(self._price):.2f}",)
        return (
            str(one.concurrency),
            " ".join(map(str, one.best.thresholds)),
            f"{costs.tokens_per_second:,.1f}",
            f"{costs.ms_per_token:.2f}",
            f"{costs.gpu_seconds_per_1000_tokens:.2f}",
            *money,
            f"{costs.tokens_per_second / one.alone:.2f}",
            f"{costs.gpu_seconds_per_1000_tokens / alone.gpu_seconds_per_1000_tokens:.2f}",
            f"{one.eager.tokens_per_second:,.1f}",
            f"{costs.tokens_per_second / one.ideal:.0%}",
        )


def _title(placement: Placement) -> str:
    network = placement.network
    gpus = f"{placement.gpus} GPU{'s'[: placement.gpus > 1]}"
    where = f"{placement.name}, {gpus}" if placement.name else gpus
    factors = ", ".join(f"{name} {factor:g}" for name, factor in zip(network.names, network.contention, strict=True))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in zip(network.names, network.shares, strict=True))
    slowed = f"; contention: {factors}" if any(network.contention) else ""
    slowed = "; one model at a time" if network.turns else slowed
    return f"{where}; share of steps: {shares}{rows_told(network)}{slowed}"
