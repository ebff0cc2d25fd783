"""What the throughput model knows of a deployment: step times, routing, what is committed, and how models slow each other down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Matrix = tuple[tuple[float, ...], ...]

_SUM_TOLERANCE = 1e-6
_SQUARINGS = 60
"""Of a lazy transition matrix: 2^60 moves, after which the slowest chain has settled."""
_UNSETTLED = 1e-8
"""Error of a stationary law beyond which it is none."""
_NEVER = 1e-9
"""Share of steps of a model that is left for good."""


class NetworkError(ValueError):
    """A description that makes no sense; the message names the field."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a model by its batch size: a line through measured points.

    Args:
        points: (batch size, seconds), by rising batch size. Below the first point the time is constant, beyond the last one the
            last slope goes on, if it rises.

    Raises:
        NetworkError: no point, a time that is not positive, or sizes that do not rise.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(later <= size for size, later in zip(sizes, sizes[1:], strict=False)):
            raise NetworkError(f"step time: batch sizes must be positive and rise, got {sizes}")
        for size, seconds in self.points:
            if not (math.isfinite(seconds) and seconds > 0):
                raise NetworkError(f"step time: {seconds} s for a batch of {size:g} is not a positive time")

    @classmethod
    def affine(cls, base: float, per_request: float = 0.0) -> StepTime:
        """`base + per_request * batch` seconds."""
        if not (math.isfinite(per_request) and per_request >= 0):
            raise NetworkError(f"step time: {per_request} s per request must be 0 or more")
        first = base + per_request
        return cls(((1.0, first),) if per_request == 0 else ((1.0, first), (2.0, first + per_request)))

    def seconds(self, batch: Floats | float) -> Floats:
        """Of steps over `batch` requests; means, so that sizes need not be whole."""
        sizes, times = (np.array(column, dtype=np.float64) for column in zip(*self.points, strict=True))
        within = np.interp(batch, sizes, times)
        if len(sizes) == 1:
            return np.asarray(within)
        slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
        return np.asarray(within + slope * np.maximum(0.0, np.asarray(batch) - sizes[-1]))

    def of(self, batch: float) -> float:
        """The same for one size."""
        return float(self.seconds(float(batch)))

    def zoomed(self, factor: float) -> StepTime:
        """The step time in a system whose requests each stand for `factor` of them."""
        return StepTime(tuple((size / factor, seconds) for size, seconds in self.points))


@dataclass(frozen=True)
class Network:
    """M models between which N requests move; model 0 is the entry, where requests start.

    Args:
        step_times: one per model.
        routing: M x M; `routing[i][j]` is the probability that a request, after a step on model i, goes on to model j.
        commit: M x M; `commit[i][j]` is the number of output tokens that this move commits. A rewriting entry drops
            the token that it routes away (0), a keeping one commits it (1).
        contention: one factor per model: while r models run, a step of model i takes 1 + contention[i] * (r - 1) times as
            long. 0: a GPU of its own; 1 for all: time slices of one GPU.
        names: of the models, for printing.
        handoff: seconds from the end of a step, when its model is ready for the next one, until a request that it handed over is
            ready at the receiver.
        decode_times: of each model's steps without routing, where a request feeds one row; () where `step_times` are the same.
        turns: one model runs at a time (`batching.overlap = false`), so that contention does not matter; of two models.

    Raises:
        NetworkError: sizes that do not fit, rows that are no distribution, values out of range.
    """

    step_times: tuple[StepTime, ...]
    routing: Matrix
    commit: Matrix
    contention: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    handoff: float = 0.0
    decode_times: tuple[StepTime, ...] = ()
    turns: bool = False
    shares: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Of each model in all steps, in the long run of a request that starts at the entry."""

    def __post_init__(self) -> None:
        count = len(self.step_times)
        if count < 2:
            raise NetworkError(f"step times: routing needs two or more models, got {count}")
        # Defaults that depend on the number of models; a frozen dataclass sets them like this.
        object.__setattr__(self, "contention", self.contention or (0.0,) * count)
        object.__setattr__(self, "names", self.names or tuple(f"model {index}" for index in range(count)))
        object.__setattr__(self, "decode_times", self.decode_times or self.step_times)
        lists = (("contention", self.contention), ("names", self.names), ("decode times", self.decode_times))
        for name, values in lists:
            if len(values) != count:
                raise NetworkError(f"{name}: {len(values)} values for {count} models")
        if any(not (math.isfinite(factor) and factor >= 0) for factor in self.contention):
            raise NetworkError(f"contention: factors must be 0 or more, got {list(self.contention)}")
        if not (math.isfinite(self.handoff) and self.handoff >= 0):
            raise NetworkError(f"handoff: {self.handoff} s must be 0 or more")
        if self.turns and count > 2:
            raise NetworkError(f"turns: known for two models, not for {count}")
        _check_matrix("routing", self.routing, count)
        _check_matrix("commit", self.commit, count)
        for row in self.routing:
            if abs(sum(row) - 1) > _SUM_TOLERANCE:
                raise NetworkError(f"routing: the row {list(row)} sums to {sum(row):g}, not to 1")
        shares = long_run(np.array(self.routing), np.eye(count)[0])
        object.__setattr__(self, "shares", tuple(shares.tolist()))
        if self.tokens_per_step <= 0:
            raise NetworkError("commit: no move that happens commits a token")

    @classmethod
    def pair(
        cls,
        step_times: Sequence[StepTime],
        there: float,
        back: float = 1.0,
        *,
        contention: Sequence[float] = (),
        names: Sequence[str] = (),
        handoff: float = 0.0,
    ) -> Network:
        """Two models of the rewrite family: a routed token of the entry is dropped, the peer keeps what it writes.

        Args:
            step_times: of the entry and of its peer.
            there: probability that a step of the entry hands the request over.
            back: probability that a step of the peer hands it back; 1: the peer writes one token per visit.
            contention: one factor per model.
            names: of the models.
            handoff: seconds of one.
        """
        for name, value in (("there", there), ("back", back)):
            if not 0 <= value <= 1:
                raise NetworkError(f"{name}: {value} is not a probability")
        routing = ((1 - there, there), (back, 1 - back))
        return cls(tuple(step_times), routing, rewrite_commit(2), tuple(contention), tuple(names), handoff)

    @property
    def size(self) -> int:
        """Number of models."""
        return len(self.step_times)

    @property
    def tokens_per_step(self) -> float:
        """Committed output tokens per request's step, all models together; steps/s times this are tokens/s."""
        moves = zip(self.shares, self.routing, self.commit, strict=True)
        return sum(share * float(np.dot(row, tokens)) for share, row, tokens in moves)

    @property
    def rows_per_step(self) -> tuple[float, ...]:
        """Tokens that a request feeds to each model per step there, in the mean; 1 for a model that is not visited.

        A model has to be fed every committed token once, whoever wrote it: all of them spread over its own steps, in the long run
        of a request that has come there.
        """
        from_each = long_run(np.array(self.routing), np.eye(self.size))
        tokens = from_each @ (np.array(self.routing) * np.array(self.commit)).sum(axis=1)
        own = np.diagonal(from_each)
        return tuple(
            max(1.0, float(tokens[model] / own[model])) if min(own[model], share) > _NEVER else 1.0
            for model, share in enumerate(self.shares)
        )

    def handoffs_per_step(self, shares: Sequence[float]) -> float:
        """Hand-offs per request's step where the models have these shares of all steps."""
        return sum(
            share * (1 - row[model]) for model, (share, row) in enumerate(zip(shares, self.routing, strict=True))
        )

    def slowest(self, concurrency: int) -> int:
        """The model with the longest step over all requests; of equal ones the last."""
        times = [step_time.of(concurrency) for step_time in self.step_times]
        return max(range(self.size), key=lambda index: (times[index], index))

    def zoomed(self, factor: float) -> Network:
        """The same deployment with `factor` requests seen as one."""
        step_times, decode_times = (
            tuple(time.zoomed(factor) for time in times) for times in (self.step_times, self.decode_times)
        )
        return replace(self, step_times=step_times, decode_times=decode_times)


def rewrite_commit(count: int) -> Matrix:
    """Commit matrix of routes whose entry drops a token that it routes away and whose peers keep theirs."""
    return ((1.0, *(0.0,) * (count - 1)), *((1.0,) * count,) * (count - 1))


def keep_commit(count: int) -> Matrix:
    """Commit matrix of routes where every step commits its token."""
    return ((1.0,) * count,) * count


def _check_matrix(name: str, matrix: Matrix, count: int) -> None:
    if len(matrix) != count or any(len(row) != count for row in matrix):
        shape = " / ".join(str(len(row)) for row in matrix)
        raise NetworkError(f"{name}: {count} models need {count} rows of {count}, got rows of {shape or 'nothing'}")
    if any(not (math.isfinite(value) and value >= 0) for row in matrix for value in row):
        raise NetworkError(f"{name}: values must be 0 or more")


def long_run(moves: Floats, start: Floats) -> Floats:
    """Shares of time in each state of a chain that starts by a law, or by each of several; any chain, periodic and reducible ones
    included."""
    lazy = (np.eye(len(moves)) + moves) / 2  # periods settle too
    for _ in range(_SQUARINGS):
        lazy = lazy @ lazy
        lazy /= lazy.sum(axis=1, keepdims=True)
    return np.asarray(start @ lazy)


def stationary(moves: Floats, start: Floats) -> Floats:
    """The law that a transition matrix leaves as it is; of several ones, that which the start leads to."""
    equations = moves.T - np.eye(len(moves))
    equations[-1] = 1.0
    right = np.zeros(len(moves))
    right[-1] = 1.0
    try:
        law = np.asarray(np.linalg.solve(equations, right), dtype=np.float64)
    except np.linalg.LinAlgError:
        return long_run(moves, start)
    settled = np.abs(law @ moves - law).max() < _UNSETTLED and law.min() > -_UNSETTLED
    return law if settled else long_run(moves, start)
