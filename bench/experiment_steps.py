"""Step times of an experiment's models alone, and what they do to each other: measured in its own windows, or read from files of
`bench.step`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.experiment_case import LARGE, MIDDLE, PLANNED, SMALL, TROUTERD, Case, CaseError
from bench.experiment_contention import Fit, Sample, fit, samples
from bench.patterns import Mixture, Pattern
from trouterd.batching.measured import read_step_time
from trouterd.batching.network import NetworkError, StepTime
from trouterd.batching.row_time import RowTime, fed

_ALONE = (SMALL, MIDDLE, LARGE)


class StepTimes:
    """Grows as windows are measured.

    Args:
        given: by model; those count for trouterd as it is, whatever is measured.
    """

    def __init__(self, given: Mapping[str, RowTime] | None = None) -> None:
        self._given = dict(given or {})
        self._points: dict[tuple[str, str, str], dict[float, float]] = {}
        """By system, workload and model."""
        self._routed: list[tuple[Case, Mapping[str, Any]]] = []
        """Windows that say for how long models ran side by side."""

    @classmethod
    def read(cls, names: Sequence[str], files: Sequence[Path], context: int) -> StepTimes:
        """From files of `bench.step`, one per model in order; none at all is allowed.

        Raises:
            NetworkError: too few files or too many, or one that cannot be used.
        """
        if files and len(files) != len(names):
            raise NetworkError(f"--step: {len(files)} files for the models {', '.join(names)}")
        return cls({name: read_step_time(path, context).time for name, path in zip(names, files, strict=False)})

    def learn(self, case: Case, window: Mapping[str, Any]) -> None:
        """What a window has shown."""
        if case.subject in _ALONE:
            step = mean_step(window, case.subject)
            if step is not None:
                points = self._points.setdefault((case.system, case.workload, case.subject), {})
                points[round(step[0], 3)] = step[1] / 1e3
        elif len(window.get("overlap") or {}) > 1:
            self._routed.append((case, window))

    def obstacle(self, cases: Sequence[Case], names: Sequence[str]) -> str:
        """Why one of these windows, which need plans, could not have one even if all go well; '' if each of them can.

        Args:
            cases: all that are to be measured.
            names: of the models.
        """
        alone = {(case.system, case.workload, case.subject) for case in cases}
        for case in cases:
            for name in names if case.batching.startswith(PLANNED) else ():
                if name not in self._given and not alone & {
                    (system, case.workload, name) for system in (TROUTERD, case.system)
                }:
                    return (
                        f"{case.key} needs a plan, and {name} alone on {case.workload} is not among the windows;"
                        f" add '*/{case.workload}/{name}/*', or give --step"
                    )
        return ""

    def of(self, workload: str, names: Sequence[str], system: str = TROUTERD) -> list[RowTime]:
        """Of these models, in order; windows of a model alone tell nothing of several rows per request.

        Args:
            workload: of the windows.
            names: of the models.
            system: whose windows count; those of trouterd as it is, where a model was not measured there.

        Raises:
            CaseError: of one of them nothing is known.
        """
        return [self._of(workload, name, system) for name in names]

    def _of(self, workload: str, name: str, system: str) -> RowTime:
        points = self._points.get((system, workload, name)) if system != TROUTERD else None
        if not points and name in self._given:
            return self._given[name]
        points = points or self._points.get((TROUTERD, workload, name))
        if not points:
            raise CaseError(
                f"no step time of the model {name}: none of its windows alone on {workload} was measured; see these, or give --step"
            )
        return RowTime(StepTime(tuple(sorted(points.items()))))

    def fit(self, workload: str, pattern: Pattern | Mixture, names: Sequence[str]) -> Fit:
        """What the models do to each other, by the windows of a workload and a pattern so far.

        Args:
            workload: of the windows.
            pattern: the routing.
            names: of the models, in its order.
        """
        own = [found for found in self._routed if (found[0].workload, found[0].subject) == (workload, pattern.key)]
        return fit(sample for case, window in own for sample in self._samples(case, window, pattern, names))

    def _samples(
        self, case: Case, window: Mapping[str, Any], pattern: Pattern | Mixture, names: Sequence[str]
    ) -> Iterable[Sample]:
        """None where a model was not measured alone, or not where its steps are others."""
        try:
            times = self.of(case.workload, names, case.system)
        except CaseError:
            return ()
        network = fed(pattern.network([time.decode for time in times], (), 0.0), times)
        alone = dict(zip(names, network.step_times, strict=True))
        for name in case.changed:
            if (case.system, case.workload, name) not in self._points:
                alone.pop(name, None)
        return samples(case.system, window, alone)


def mean_step(window: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Requests and milliseconds of a model's step in a window as in a result file, without those that fed a prompt where these can
    be told; None: there was no step."""
    if own := (window.get("overlap") or {}).get(name):
        return own["batch"], own["step_ms"]
    batch, step_ms = (window.get("batch") or {}).get(name), (window.get("step_ms") or {}).get(name)
    return (batch, step_ms) if batch and step_ms else None


def longer(time: StepTime, more_ms: float) -> StepTime:
    """A step time with what hand-offs were found to add for each request."""
    last, _ = time.points[-1]
    sizes = [*(size for size, _ in time.points), 2 * last]
    return StepTime(tuple((size, time.of(size) + more_ms / 1e3 * size) for size in sizes))
