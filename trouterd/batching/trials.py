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
SETTLE = 2.0
"""Of those that do not count: the first ones."""
FREEZE = 60.0
"""Seconds without a change after one that was taken back; doubles each time."""
TRY = 600.0
"""Seconds from one trial of the other choice to the next; doubles with each one that does not stay. So trials take less than 2 % of
the time."""
LONGEST = 3600.0
"""Seconds that both grow to."""
LIKE = 0.2
"""Numbers of requests that differ by no more than this share are compared."""
PROMPTS = 0.05
"""The same of shares of the time that go into prompts, by their difference: no more than `LOSS`, for what a burst of prompts takes
from the tokens must not be taken for one."""
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
        trust: as learned before; brought into its bounds.
    """

    def __init__(self, trust: float = 1.0) -> None:
        self.trust = _bounded(trust)
        """What waiting has reached over what was promised, both relative to eager launches; 1 as long as nobody knows."""
        self._change: _Change | None = None
        self._frozen_until = 0.0
        self._freeze = FREEZE
        self._next: float | None = None
        """When the other choice is tried; None: nothing has been planned yet."""
        self._pause = TRY

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
        self._next = now + self._pause

    def forget(self) -> None:
        """Workers do not go by the lists, or nothing is known: there is nothing to compare."""
        self._change = self._next = None

    def judge(self, now: float, measured: Measured) -> Lists | None:
        """Look at a change that has run its time; returns the lists to go back to if it is not to stay."""
        change = self._change
        if change is None or now - change.since < HOLD:
            return None
        self._change = None
        load = measured(now, now - change.since - SETTLE)
        if not _alike(change.load, load):
            return change.before if change.trial else None
        gain = load.rate / change.load.rate
        if change.promise and gain:
            reached = gain if change.waits else 1 / gain
            self.trust = _bounded(reached / change.promise)
        if change.trial:
            stays = gain > 1 + BETTER
            self._pause = TRY if stays else min(2 * self._pause, LONGEST)
            self._next = now + self._pause
        else:
            stays = gain >= 1 - LOSS
            self._frozen_until = now if stays else now + self._freeze
            self._freeze = FREEZE if stays else min(2 * self._freeze, LONGEST)
        return None if stays else change.before

    def pending(self, now: float) -> str:
        """Why nothing may change now; '' if it may."""
        if self._change is not None:
            return "trying the other choice" if self._change.trial else "watching the latest change"
        if now < self._frozen_until:
            return f"taken back: {self._frozen_until - now:.0f} s until the next change"
        return ""

    def due(self, now: float) -> bool:
        """Whether to try the other choice; to be asked only when something may change."""
        if self._next is None:
            self._next = now + self._pause
        return now >= self._next


def _alike(before: Load, after: Load) -> bool:
    """Whether throughput differs by the lists alone; never where it was not measured before."""
    if not (before.rate and abs(after.active - before.active) <= LIKE * before.active):
        return False
    # Where each request is followed by another one the share of prompts rises and falls with the throughput; a burst of prompts
    # moves them apart.
    steady = before.prompts, before.prompts * after.rate / before.rate
    return min(steady) - PROMPTS <= after.prompts <= max(steady) + PROMPTS


def _bounded(trust: float) -> float:
    return min(max(trust, _TRUST[0]), _TRUST[1])
