"""Scheduling policies of a simulation: which idle models launch at an instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from trouterd.batching.launch import Reason, reason, stranded


@dataclass(frozen=True)
class Instant:
    """What a policy sees after everything that ends at `now` has ended."""

    now: float
    ready: tuple[int, ...]
    """Per model, requests that wait for a step there."""
    oldest: tuple[float, ...]
    """Per model, from when on the first of them counts its wait: of a hand-off, from when it was handed over; infinity if there is
    none."""
    running: tuple[bool, ...]
    active: int
    """Requests that have not ended."""
    moving: bool = False
    """Whether some of them are on their way from one model to another."""


class Policy(Protocol):
    """Decides launches; may keep state, so take a fresh one for each simulation."""

    @property
    def barrier(self) -> bool:
        """Whether a step's results are seen only when all models that run have finished theirs."""
        ...

    def launches(self, instant: Instant) -> Sequence[int]:
        """The idle models with ready requests that launch all of them now."""
        ...

    def wake(self, instant: Instant) -> float:
        """When to ask again if nothing ends before; infinity: not needed."""
        ...


class Delayed:
    """Launch when B[n] requests are ready or the oldest has waited `linger`.

    Args:
        lists: per model its thresholds for n = 1, 2, ... active requests; beyond the end the last one holds.
        linger: seconds, of every model; None: no limit.
        guard: launch the most ready model when otherwise nothing would ever happen again.
    """

    barrier = False

    def __init__(self, lists: Sequence[Sequence[int]], linger: float | None = None, *, guard: bool = True) -> None:
        self._lists = lists
        self._linger = linger
        self._guard = guard
        self.reasons = dict.fromkeys(Reason, 0)
        """Launches so far by reason."""

    def launches(self, instant: Instant) -> Sequence[int]:
        """By `launch.reason`, else by `launch.stranded`."""
        found: list[int] = []
        for model, thresholds in enumerate(self._lists):
            if instant.running[model]:
                continue
            threshold = thresholds[min(instant.active, len(thresholds)) - 1]
            why = reason(instant.ready[model], threshold, self._waited(instant, model), self._linger)
            if why is not None:
                self.reasons[why] += 1
                found.append(model)
        if (
            not found
            and self._guard
            and not any(instant.running)
            and not instant.moving
            and (model_left := stranded(instant.ready)) is not None
        ):
            self.reasons[Reason.GUARD] += 1
            found.append(model_left)
        return found

    def _waited(self, instant: Instant, model: int) -> float:
        # Compared as `wake` computes it: a difference of times could come out just below.
        oldest = instant.oldest[model]
        if self._linger is not None and instant.now >= oldest + self._linger:
            return self._linger
        return instant.now - oldest

    def wake(self, instant: Instant) -> float:
        """When the oldest request at an idle model will have waited `linger`."""
        if self._linger is None:
            return float("inf")
        idle = zip(instant.oldest, instant.running, strict=True)
        return min(oldest + self._linger if not running else float("inf") for oldest, running in idle)


def constant(thresholds: Sequence[int], linger: float | None = None) -> Delayed:
    """Thresholds that hold whatever number of requests is active; all 1: eager execution."""
    return Delayed([[threshold] for threshold in thresholds], linger)


class Turns:
    """Thresholds as `Delayed` has them, but one model at a time, as `batching.overlap = false` has it.

    Of two models that may launch the one goes that has not had the last turn. A turn takes as long to pass on as a hand-off does:
    those who have just left find the next model's launch.
    """

    barrier = False

    def __init__(self, thresholds: Sequence[int]) -> None:
        self._delayed = constant(thresholds)
        self._last = -1

    def launches(self, instant: Instant) -> Sequence[int]:
        """One model, when none runs."""
        if any(instant.running):
            return []
        found = self._delayed.launches(instant)
        others = [model for model in found if model != self._last]
        if others:
            if instant.moving:
                return []
            self._last = min(others, key=lambda model: (model - self._last - 1) % len(instant.ready))
        return [self._last] if found else []

    def wake(self, instant: Instant) -> float:
        """When those thresholds have it."""
        return self._delayed.wake(instant)


class Synchronous:
    """All requests step together: the next round starts when every model has finished the last one."""

    barrier = True

    def launches(self, instant: Instant) -> Sequence[int]:
        """All models with ready requests, or none."""
        return [] if any(instant.running) or instant.moving else _waiting(instant)

    def wake(self, instant: Instant) -> float:  # noqa: ARG002 - the protocol's
        """Never."""
        return float("inf")


class Choice(Enum):
    """Which model goes next where only one may run."""

    ALTERNATE = "alternate"
    """The next one in order after the last that ran."""
    MOST_WAITING = "most waiting"
    STAY = "stay"
    """The last one, as long as it has requests."""
    LAST_FIRST = "last first"
    """The last model of the route that has requests."""


class Serial:
    """One model runs at a time, on everything that is ready there."""

    barrier = False

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._last = -1

    def launches(self, instant: Instant) -> Sequence[int]:
        """One model, when none runs."""
        waiting = _waiting(instant)
        if any(instant.running) or not waiting:
            return []
        self._last = self._choose(instant, waiting)
        return [self._last]

    def _choose(self, instant: Instant, waiting: Sequence[int]) -> int:
        match self._choice:
            case Choice.MOST_WAITING:
                return max(waiting, key=lambda model: instant.ready[model])
            case Choice.STAY if self._last in waiting:
                return self._last
            case Choice.LAST_FIRST:
                return waiting[-1]
        return min(waiting, key=lambda model: (model - self._last - 1) % len(instant.ready))

    def wake(self, instant: Instant) -> float:  # noqa: ARG002 - the protocol's
        """Never."""
        return float("inf")


def _waiting(instant: Instant) -> list[int]:
    return [model for model, ready in enumerate(instant.ready) if ready]
