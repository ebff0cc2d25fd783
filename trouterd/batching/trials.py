"""Changes of thresholds that are being watched, and what they have taught about the throughput model's promises.

Whatever the model leaves out, measured throughput has the last word: a change that costs throughput is taken back, and from time to
time the other choice, eager launches or the plan's, is tried for a few seconds and stays if it is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Lists = dict[str, list[int]]

LOSS = 0.05
"""Fall of the measured throughput for which a change is taken back."""
BETTER = 0.02
"""Rise of it for which a trial of the other choice stays."""
HOLD = 10.0
"""Seconds for which a change is left alone and watched."""
LONGEST_WATCH = 60.0
"""The same where loads stay unlike; then it stays unjudged. Shares of prompts settle the longer they are looked at."""
SETTLE = 2.0
"""Of those that do not count: the first ones."""
FREEZE = 60.0
"""Seconds without a change after one that was taken back; doubles each time."""
TRY = 600.0
"""Seconds from one trial of the other choice to the next; doubles with each one that does not stay. So trials take less than 2 % of
the time."""
EARLY = 30.0
"""The same up to the very first trial, where the throughput model promises too little of waiting."""
LONGEST = 3600.0
"""Seconds that both grow to."""
LIKE = 0.2
"""Numbers of requests that differ by no more than this share are compared."""
MOST_PROMPTS = 0.7
"""Share of the time in prompts beyond which what is left of it is too small a part to judge by."""
DIFFER = 0.15
"""Shares of the time in prompts that differ by no more than this are compared: steps with prompts give some tokens too, and those
who wait for their first one give none beside them."""
_TRUST = (0.5, 1.5)


@dataclass(frozen=True)
class Load:
    """What was measured over some seconds; zeros: nothing."""

    rate: float = 0.0
    """Tokens/s."""
    active: float = 0.0
    """Requests, in the mean."""
    prompts: float = 0.0
    """Share of the time that the model with the most of them spent in steps with prompts."""

    @property
    def decode(self) -> float:
        """Tokens/s of the time that is not spent in prompts, which is what the throughput model speaks of; of shares below 1."""
        return self.rate / (1 - self.prompts)

    @property
    def telling(self) -> bool:
        """Whether another load can be compared with it."""
        return self.rate > 0 and self.prompts <= MOST_PROMPTS


Measured = Callable[[float, float], Load]
"""Given now and for how many seconds before."""


@dataclass(frozen=True)
class _Change:
    """What is being watched."""

    since: float
    before: Lists
    load: Load
    """Before it."""
    promise: float
    """Tokens/s of the lists that wait over those that launch eagerly, by the throughput model; 0: both wait, or there is none."""
    waits: bool
    """The new lists wait."""
    trial: bool


class Trials:
    """Of one group.

    Args:
        trust: as learned before; brought into its bounds, as are the next two.
        now: seconds.
        frozen: seconds from then on that are left of a freeze.
        freeze: seconds of the next one.
    """

    def __init__(self, trust: float = 1.0, now: float = 0.0, frozen: float = 0.0, freeze: float = FREEZE) -> None:
        self.trust = _bounded(trust)
        """What waiting has reached over what was promised, both relative to eager launches; 1 as long as nobody knows."""
        self.freeze = min(max(freeze, FREEZE), LONGEST)
        """Seconds without a change after the next one that is taken back."""
        self._change: _Change | None = None
        self._frozen_until = now + min(frozen, LONGEST)
        self._next: float | None = None
        """When the other choice is tried; None: nothing has been planned yet."""
        self._pause = TRY
        self._tried = False
        """One has had a verdict."""
        self._early: float | None = None
        """When the first one may come early; None: nobody has asked for it yet."""

    @property
    def untried(self) -> Lists | None:
        """What was in force before the other choice, which is being tried; None: it is not."""
        return self._change.before if self._change is not None and self._change.trial else None

    def frozen(self, now: float) -> float:
        """Seconds for which nothing may change, since a change was taken back."""
        return max(self._frozen_until - now, 0.0)

    def watch(self, now: float, before: Lists, load: Load, promise: float, *, waits: bool, trial: bool) -> None:
        """Lists have been replaced.

        Args:
            now: seconds.
            before: the lists that were replaced.
            load: what was measured under them.
            promise: of waiting over eager launches, by the model alone; 0 where both lists wait, or where there is none.
            waits: the new lists wait.
            trial: the new lists are the other choice, not what the model asks for.
        """
        self._change = _Change(now, before, load, promise, waits, trial)
        self._next, self._early = now + self._pause, None

    def forget(self) -> None:
        """Workers do not go by the lists, or nothing is known: there is nothing to compare."""
        self._change = self._next = None

    def judge(self, now: float, measured: Measured) -> Lists | None:
        """Look at a change that has run its time; returns the lists to go back to if it is not to stay."""
        change = self._change
        if change is None or now - change.since < HOLD:
            return None
        load = measured(now, now - change.since - SETTLE)
        alike = _alike(change.load, load)
        if not alike and not change.trial and change.load.telling and now - change.since < LONGEST_WATCH:
            return None
        self._change = None
        if not alike:
            return change.before if change.trial else None
        gain = load.decode / change.load.decode
        if change.promise and gain:
            reached = gain if change.waits else 1 / gain
            self.trust = _bounded(reached / change.promise)
        if change.trial:
            self._tried = True
            stays = gain > 1 + BETTER
            self._pause = TRY if stays else min(2 * self._pause, LONGEST)
            self._next = now + self._pause
        else:
            stays = gain >= 1 - LOSS
            self._frozen_until = now if stays else now + self.freeze
            self.freeze = FREEZE if stays else min(2 * self.freeze, LONGEST)
        return None if stays else change.before

    def pending(self, now: float) -> str:
        """Why nothing may change now; '' if it may."""
        if self._change is not None:
            return "trying the other choice" if self._change.trial else "watching the latest change"
        if frozen := self.frozen(now):
            return f"taken back: {frozen:.0f} s until the next change"
        return ""

    def due(self, now: float, *, early: bool = False) -> bool:
        """Whether to try the other choice; to be asked only when something may change.

        Args:
            now: seconds.
            early: what the model promises is known to be too little.
        """
        if self._next is None:
            self._next = now + self._pause
        if early and not self._tried:
            if self._early is None:
                self._early = now + EARLY
            return now >= self._early
        return now >= self._next


def _alike(before: Load, after: Load) -> bool:
    """Whether throughput differs by the lists alone."""
    return (
        before.telling
        and after.prompts <= MOST_PROMPTS
        and abs(after.prompts - before.prompts) <= DIFFER
        and abs(after.active - before.active) <= LIKE * before.active
    )


def _bounded(trust: float) -> float:
    return min(max(trust, _TRUST[0]), _TRUST[1])
