"""For how long steps of models that share a GPU ran at the same time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from trouterd.batching.network import Floats
from trouterd.batching.report import STEPS, Report, Step

Sample = tuple[int, float, float]
"""Requests of a step, its seconds, and the share of them during which other models of the GPU ran; above 1: several at once."""


class Overlaps:
    """Of steps with those of other models, as reports come in.

    A step that runs while reports are made is in the next ones, so that what ran beside a step is known only by then.

    Args:
        sharing: models that share GPUs.
    """

    def __init__(self, sharing: Collection[str]) -> None:
        self._sharing = sharing
        self._before: dict[str, list[Step]] = {}
        """Of the reports before the latest ones, which have been measured."""
        self._latest: dict[str, list[Step]] = {}
        self._known = -float("inf")
        """From then on all steps have been reported: where reports were late, a worker has kept its latest ones only."""

    def observe(self, reports: Mapping[str, Report]) -> dict[str, list[Sample]]:
        """Samples by model: what is known with these reports and was not before.

        Of models that share GPUs there are none around a report that is missing, since nobody knows what ran beside them.
        """
        found = {
            name: _samples(report.steps, np.zeros(len(report.steps)))
            for name, report in reports.items()
            if name not in self._sharing
        }
        if not all(name in reports for name in self._sharing):
            self._before, self._latest = {}, {}
            return found
        new = {name: reports[name].steps for name in self._sharing}
        if cut := [steps[0].begin for steps in new.values() if len(steps) >= STEPS]:
            self._before, self._latest, self._known = {}, {}, max(cut)
        if self._latest:
            around = {name: self._before.get(name, []) + self._latest[name] + new[name] for name in self._sharing}
            found |= {name: self._measured(name, around) for name in self._sharing}
        self._before, self._latest = self._latest, new
        return found

    def _measured(self, name: str, around: Mapping[str, Sequence[Step]]) -> list[Sample]:
        steps = [step for step in self._latest[name] if step.begin >= self._known]
        seconds = np.maximum([step.seconds for step in steps], 1e-9)
        others = [own for other, own in around.items() if other != name]
        return _samples(steps, sum((overlapped(steps, own) / seconds for own in others), np.zeros(len(steps))))


def _samples(steps: Sequence[Step], shares: Floats) -> list[Sample]:
    # Those without requests are here for what they do to others.
    pairs = zip(steps, shares.tolist(), strict=True)
    return [(step.requests, step.seconds, share) for step, share in pairs if step.requests and step.seconds > 0]


def overlapped(steps: Sequence[Step], others: Sequence[Step]) -> Floats:
    """Seconds of each step during which the other model ran.

    Args:
        steps: of one model.
        others: of the other one, in order; they do not overlap each other.

    Returns:
        [len(steps)] seconds.
    """
    begin = np.array([step.begin for step in steps])
    end = begin + np.array([step.seconds for step in steps])
    if not others:
        return np.zeros(len(steps))
    edges = np.array([edge for step in others for edge in (step.begin, step.begin + step.seconds)])
    edges = np.maximum.accumulate(edges)
    busy = np.concatenate(([0.0], np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0))))
    return np.asarray(np.interp(end, edges, busy) - np.interp(begin, edges, busy))
