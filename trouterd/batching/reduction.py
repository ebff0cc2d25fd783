"""The fast form of the throughput model: a chain embedded at the launches of the slow model.

Its state is one number, the size of the slow model's batch, instead of everything that is under way at every model. What happens
during a slow step is approximated: the fast model takes a mean number of steps in it, and requests that come back wait half a fast
step for the one under way. Everything else (stayers, idle time until the threshold is met, contention) is summed exactly.

Hand-offs may take time. By a clock of the fast model that is late by one of them, those to the slow model arrive at once and those
back take twice as long; no order of events changes by that. So only who comes back is on its way here.
"""

from __future__ import annotations

import math

import numpy as np

from trouterd.batching.binomial import pmf
from trouterd.batching.network import Floats, stationary
from trouterd.batching.pair import Pair

_MEAN_FIELD_ROUNDS = 4
_MEAN_WAIT = 0.5
"""Of a fast step: how long one who comes back waits for the fast model."""


class Reduction:
    """A pair with N requests and one threshold of the fast model; answers for every threshold of the slow one.

    Rows of all arrays are launch sizes of the slow model, k = 1..N; columns are numbers of requests, 0..N.

    Args:
        pair: both models.
        concurrency: N.
        fast_threshold: of the fast model.
    """

    def __init__(self, pair: Pair, concurrency: int, fast_threshold: int = 1) -> None:
        self._pair, self._concurrency, self._fast_threshold = pair, concurrency, fast_threshold
        self._launches = np.arange(1, concurrency + 1)
        self._left = concurrency - self._launches
        """Requests at the fast model when the slow one launches."""
        self._slow = pair.slow.seconds(self._launches.astype(np.float64))
        self._fast_steps = self._steps_within()
        self._fast_moves = pmf(np.arange(concurrency + 1), pair.there, concurrency)
        arrivals, busy = self._arrivals() if fast_threshold == 1 else self._step_by_step()
        self._waiting = self._with_stayers(arrivals)
        self._durations = self._slow * (1 + pair.slow_contention * busy)
        self._away = self._coming_back()
        self._jumps, self._pauses = self._alone()
        self._visits = np.linalg.inv(np.eye(concurrency + 1) - self._jumps)
        """Entry (a, b): probability that b requests are ever seen waiting after a, if the slow model never launched."""

    def steps_per_second(self, slow_threshold: int) -> float:
        """Requests' steps of all models."""
        first = slow_threshold
        below = self._waiting[first - 1 :, :first] @ self._visits[:first, :first]
        launch = self._waiting[first - 1 :, first:] + below @ self._jumps[:first, first:]
        # All requests begin at the fast model.
        law = stationary(launch, self._visits[0, :first] @ self._jumps[:first, first:])
        pauses = below @ self._pauses[:first] + (self._waiting * self._away)[first - 1 :, :first].sum(axis=1)
        seconds = self._durations[first - 1 :] + pauses
        return float(law @ self._launches[first - 1 :] / (law @ seconds) / self._pair.slow_share)

    def _steps_within(self) -> Floats:
        """Steps that the fast model takes during a slow one, if it never runs out of requests."""
        pair = self._pair
        work = self._slow * (1 + pair.slow_contention) / (1 + pair.fast_contention)
        present = self._left.astype(np.float64)
        for _ in range(_MEAN_FIELD_ROUNDS):
            steps = work / pair.fast.seconds(present)
            present = self._left * (1 + (1 - pair.there) ** steps) / 2
        return steps

    def _effective_steps(self) -> Floats:
        """The same without what is lost while those who come back are on their way and wait for the fast step under way."""
        returned = np.minimum(1.0, self._launches * self._pair.back / np.maximum(self._left, 1))
        returned = np.where(self._left > 0, returned, 1.0)
        away = 2 * self._pair.handoff * self._fast_steps / self._slow
        return np.maximum(0.0, self._fast_steps - (_MEAN_WAIT + away) * returned)

    def _coming_back(self) -> Floats:
        """Mean seconds for which requests at the fast model are on their way there when a slow step has ended; columns: those that
        wait at the slow one then."""
        there = np.maximum(self._concurrency - np.arange(self._concurrency + 1), 1)
        returned = np.minimum(1.0, self._launches[:, None] * self._pair.back / there)
        return 2 * self._pair.handoff * returned

    def _arrivals(self) -> tuple[Floats, Floats]:
        """Law of the requests that reach the slow model during its step, and the share of that step for which the fast one runs.

        The fast one runs until it has nobody left.
        """
        stay = 1 - self._pair.there
        arrivals = pmf(self._left, 1 - stay ** self._effective_steps(), self._concurrency)
        if self._pair.slow_contention == 0:
            return arrivals, np.zeros_like(self._slow)
        number = np.arange(math.ceil(self._fast_steps.max()))
        empty = (1 - stay**number) ** self._left[:, None]
        within = np.clip(self._fast_steps[:, None] - number, 0.0, 1.0)
        return arrivals, ((1 - empty) * within).sum(axis=1) / self._fast_steps

    def _step_by_step(self) -> tuple[Floats, Floats]:
        """The same where the fast one stops below its threshold: its requests are followed step by step."""
        size, threshold = self._concurrency + 1, self._fast_threshold
        arrivals, busy = np.zeros((self._concurrency, size)), np.zeros_like(self._slow)
        arrivals[:, 0] = 1.0
        rows = np.flatnonzero(self._left >= threshold)
        counts = np.arange(size)
        moved = counts[threshold:, None] - counts
        step = np.where(moved >= 0, self._fast_moves[counts[threshold:, None], np.maximum(moved, 0)], 0.0)
        effective, most = self._effective_steps()[rows], self._fast_steps[rows]
        whole = np.floor(effective)
        part = effective - whole
        law = np.eye(size)[self._left[rows]]
        share = np.clip(most - np.arange(math.ceil(most.max(initial=0.0)) + 1)[:, None], 0.0, 1.0)
        for number, within in enumerate(share):
            runs = law[:, threshold:]
            busy[rows] += runs.sum(axis=1) * within
            after = runs @ step
            after[:, :threshold] += law[:, :threshold]
            for row in np.flatnonzero(whole == number):
                left = self._left[rows[row]]
                found = (1 - part[row]) * law[row] + part[row] * after[row]
                arrivals[rows[row], : left + 1] = found[left::-1]
            law = after
        return arrivals, busy / self._fast_steps

    def _with_stayers(self, arrivals: Floats) -> Floats:
        """Law of the requests that wait at the slow model when its step has ended: arrivals and those of its batch that stay."""
        if self._pair.back == 1:
            return arrivals
        size = self._concurrency + 1
        stayers = pmf(self._launches, 1 - self._pair.back, self._concurrency)
        length = 2 * size
        spectrum = np.fft.rfft(arrivals, length, axis=1) * np.fft.rfft(stayers, length, axis=1)
        waiting: Floats = np.clip(np.fft.irfft(spectrum, length, axis=1)[:, :size], 0.0, None)
        waiting /= waiting.sum(axis=1, keepdims=True)
        return waiting

    def _alone(self) -> tuple[Floats, Floats]:
        """While the slow model waits: how many wait there after the next fast step that brings someone, and the mean time to it."""
        size = self._concurrency + 1
        jumps = np.zeros((size, size))
        present = np.arange(self._concurrency, 0, -1)
        moves = self._fast_moves[present]
        some = 1 - moves[:, 0]
        for waiting, (row, chance) in enumerate(zip(moves, some, strict=True)):
            jumps[waiting, waiting + 1 :] = row[1 : size - waiting] / chance
        pauses = np.append(self._pair.fast.seconds(present.astype(np.float64)) / some, 0.0)
        return jumps, pauses
