"""What a worker keeps for the controller of delayed batching."""

from __future__ import annotations

from collections import deque

from trouterd.batching.report import Report, Step
from trouterd.worker.scheduler import Chunk
from trouterd.worker.stats import Stats
from trouterd.worker.stepper import Outcome

STEPS = 1024
"""Steps that are kept between two reports."""


class Observer:
    """Steps until somebody asks; everything else is in the stats."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._decisions = 0
        self.busy_seconds = 0.0
        """Of all steps, what they cost around the model included."""
        self._steps: deque[Step] = deque(maxlen=STEPS)

    def note(self, outcome: Outcome, begin: float, now: float) -> None:
        """A step has ended; to be called before it changes its requests.

        Args:
            outcome: what it decided.
            begin: when the decode loop launched it, if it was alone then: until `now` the model could do nothing else. 0: it was
                queued behind another step, and took what the device says.
            now: time.monotonic().
        """
        self._decisions += sum(outcome.alive)
        seconds = now - begin if begin else outcome.seconds
        self.busy_seconds += seconds
        if all(map(_no_prompt, outcome.chunks)):
            self._steps.append(Step(now - seconds, seconds, len(outcome.chunks)))

    def report(self, now: float, active: int, version: int) -> Report:
        """All counts, and the steps since the last report."""
        stats = self._stats
        report = Report(
            now=now,
            active=active,
            version=version,
            tokens=stats.tokens,
            decisions=self._decisions,
            moves={target: count for (_, target), count in stats.handoffs.items()},
            runs=dict(stats.runs),
            steps=list(self._steps),
        )
        self._steps.clear()
        return report


def _no_prompt(chunk: Chunk) -> bool:
    return chunk.wants_logits and chunk.first >= chunk.request.prompt_length - 1
