"""What a worker keeps for the controller of delayed batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from trouterd.batching.report import STEPS, Report, Step
from trouterd.worker.scheduler import Chunk
from trouterd.worker.stats import Stats
from trouterd.worker.stepper import Outcome

LATEST = 1 << 14
"""Steps that are kept for whoever measures: 10 s and more of a small model."""


class Observer:
    """Steps and hand-offs until somebody asks; everything else is in the stats.

    A step with none queued behind it lasts until the decode loop can launch the next one, and one that was alone from the decision
    to launch it: the model can do nothing else meanwhile. A hand-off then takes what lies between that end at its sender and the
    launch at a receiver that had been waiting for it; each side reports how far its end is from the sending. Of a step with another
    one behind it, be that of rows that leave with this one, the end is before the sending.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._decisions = 0
        self.busy_seconds = 0.0
        """Of all steps, what they cost around the model included."""
        self.prompt_seconds = 0.0
        """Of those that fed a part of a prompt."""
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._latest: deque[Step] = deque(maxlen=LATEST)
        self._open: tuple[float, float, int, bool] | None = None
        """Begin of a step with none behind it, when its outcome was seen, its requests as in `Step`, and whether it fed a
        prompt."""
        self._idle_since = float("inf")
        """From then on the model had nothing to do, if it is not in a step now."""
        self.waited, self.waited_seconds = 0, 0.0
        self.handed, self.handed_seconds = 0, 0.0
        """As in `Report`."""
        self._followed_at = float("inf")
        """When the latest step ended, if another one was queued behind it; what it hands over is sent from then on."""

    def note(self, outcome: Outcome, begin: float, now: float, *, followed: bool) -> None:
        """A step has ended; to be called before it changes its requests.

        Args:
            outcome: what it decided.
            begin: when the decode loop decided to launch it, if it was alone then. 0: it was queued behind another step, and took
                what the device says.
            now: time.monotonic().
            followed: another step was queued behind it.
        """
        self._sent(self._followed_at, self._followed_at)
        self._followed_at = now if followed else float("inf")
        alive = sum(outcome.alive)
        self._decisions += alive
        requests = alive if _no_prompts(outcome.chunks) else 0
        prompts = not requests and _fed_prompts(outcome)
        begin = begin or now - outcome.seconds
        self._idle_since = now
        if followed:
            self._add(begin, now, requests, prompts=prompts)
        else:
            self._open = begin, now, requests, prompts

    def ready(self, now: float) -> None:
        """The decode loop could launch a step now."""
        self._sent(self._followed_at, self._followed_at)
        self._followed_at = float("inf")
        if self._open is None:
            return
        begin, seen, requests, prompts = self._open
        self._open = None
        self._idle_since = now
        self._add(begin, now, requests, prompts=prompts)
        self._sent(seen, now)

    def awaited(self, chunks: Sequence[Chunk], sent: float, now: float) -> None:
        """A step is launched for hand-offs, and nothing else runs.

        Args:
            chunks: what it feeds.
            sent: when the last of them left its sender, time.monotonic().
            now: the same clock.
        """
        if sent > self._idle_since and _no_prompts(chunks):
            self.waited += 1
            self.waited_seconds += now - sent

    def _sent(self, seen: float, end: float) -> None:
        """Count what a step that ended then has handed over, if anything was since its outcome was seen."""
        if self._stats.handed_at >= seen:
            self.handed += 1
            self.handed_seconds += end - self._stats.handed_at

    def _add(self, begin: float, end: float, requests: int, *, prompts: bool) -> None:
        self.busy_seconds += end - begin
        self.prompt_seconds += (end - begin) * prompts
        step = Step(begin, end - begin, requests)
        self._latest.append(step)
        self._steps.append(step)

    def since(self, moment: float) -> list[Step]:
        """The latest steps, from the first that ended after this time.monotonic() on; one that fed a prompt, or nobody, has 0
        requests."""
        found = list(takewhile(lambda step: step.begin + step.seconds > moment, reversed(self._latest)))
        return found[::-1]

    def report(self, now: float, active: int, version: int) -> Report:
        """All counts, and the steps since the last report."""
        stats = self._stats
        report = Report(
            now=now,
            since=stats.since,
            active=active,
            version=version,
            tokens=stats.tokens,
            decisions=self._decisions,
            moves={target: count for (_, target), count in stats.handoffs.items()},
            runs=dict(stats.runs),
            steps=list(self._steps),
            waited=self.waited,
            waited_seconds=self.waited_seconds,
            handed=self.handed,
            handed_seconds=self.handed_seconds,
            prompt_seconds=self.prompt_seconds,
        )
        self._steps.clear()
        return report


def _fed_prompts(outcome: Outcome) -> bool:
    # Chunks that want no logits have no entry in `alive`.
    alive = iter(outcome.alive)
    return not _no_prompts([chunk for chunk in outcome.chunks if not chunk.wants_logits or next(alive)])


def _no_prompts(chunks: Sequence[Chunk]) -> bool:
    return all(chunk.wants_logits and chunk.first >= chunk.request.prompt_length - 1 for chunk in chunks)
