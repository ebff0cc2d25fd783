"""Throughput of any thresholds at any number of requests, by the reduction."""

from __future__ import annotations

from collections.abc import Sequence

from trouterd.batching.launch import clamp
from trouterd.batching.network import Network
from trouterd.batching.pair import Pair, fold
from trouterd.batching.reduction import Reduction
from trouterd.batching.turns import TurnChain

WHOLE = 48
"""Requests up to which a system is solved as it is; above, each of so many stands for several."""


class Predictor:
    """Holds what is the same for all thresholds of one network.

    Args:
        network: the deployment.
        concurrency: the most requests that will be asked about.
    """

    def __init__(self, network: Network, concurrency: int) -> None:
        self.network = network
        folded = fold(network, concurrency)
        self.pair: Pair | None = folded if isinstance(folded, Pair) else None
        """None: in the long run only one model is used, and no threshold matters."""
        self.slow_model = folded.slow_model if isinstance(folded, Pair) else folded
        """The slowest of the models that are used."""

    @property
    def reliable(self) -> bool:
        """Whether the reduction holds: not where three or more models slow each other down (up to a fifth too low there)."""
        return self.network.size == 2 or not any(self.network.contention)

    def covers(self, thresholds: Sequence[int]) -> bool:
        """Whether it can judge these, reliably."""
        return self.reliable and self.judges(thresholds)

    def judges(self, thresholds: Sequence[int]) -> bool:
        """Whether it can judge these at all: of three or more models only the slowest may wait."""
        others = [threshold for model, threshold in enumerate(thresholds) if model != self.slow_model]
        return len(others) == 1 or set(others) == {1}

    def steps_per_second(self, active: int, thresholds: Sequence[int]) -> float:
        """Predicted requests' steps of all models; times `network.tokens_per_step` for tokens/s.

        Args:
            active: requests in flight, up to the constructor's.
            thresholds: one per model; those of three or more models may differ from 1 for the slowest one alone.

        Raises:
            ValueError: thresholds that can deadlock, or that this model of throughput cannot judge.
        """
        if len(thresholds) != self.network.size or clamp(thresholds, active) != tuple(thresholds):
            raise ValueError(f"thresholds {list(thresholds)} are not feasible for {active} requests")
        if (alone := self.trivial(active)) is not None:
            return alone
        size = min(active, WHOLE)
        fast, slow = rescaled(self.split(thresholds), active, size)
        return self.reduction(active, fast).steps_per_second(slow) * active / size

    def trivial(self, active: int) -> float | None:
        """Steps/s where no threshold can change them: one request alone, or one model for all of them; else None."""
        times = self.network.step_times
        if active == 1:
            steps = sum(share * time.of(1) for share, time in zip(self.network.shares, times, strict=True))
            return 1 / (steps + self.network.handoff * self.network.handoffs_per_step(self.network.shares))
        return active / times[self.slow_model].of(active) if self.pair is None else None

    def split(self, thresholds: Sequence[int]) -> tuple[int, int]:
        """Those of the fast and of the slow server of the pair."""
        if not self.judges(thresholds):
            raise ValueError(f"thresholds {list(thresholds)}: of three or more models only the slowest may wait here")
        other = next(model for model in range(len(thresholds)) if model != self.slow_model)
        return thresholds[other], thresholds[self.slow_model]

    def join(self, fast: int, slow: int) -> tuple[int, ...]:
        """The other way round: one threshold per model."""
        fast = fast if self.network.size == 2 else 1
        return tuple(slow if model == self.slow_model else fast for model in range(self.network.size))

    def reduction(self, active: int, fast_threshold: int) -> Reduction | TurnChain:
        """Of `active` requests, or of WHOLE that stand for them."""
        if self.pair is None:
            raise ValueError("only one model is used: there is nothing to reduce")
        factor = max(1.0, active / WHOLE)
        solver = TurnChain if self.network.turns else Reduction
        return solver(self.pair.zoomed(factor), min(active, WHOLE), fast_threshold)


def rescaled(pair: tuple[int, int], active: int, size: int) -> tuple[int, int]:
    """Thresholds of a pair for `active` requests as those for `size` of them; pairs that leave no slack stay without."""
    fast, slow = (round(1 + (threshold - 1) * size / active) for threshold in pair)
    fast = min(fast, size)
    # One more or less than N + 1 in all makes the difference between models that take turns and models that slow each other down.
    return fast, size + 1 - fast if sum(pair) == active + 1 else min(slow, size + 1 - fast)
