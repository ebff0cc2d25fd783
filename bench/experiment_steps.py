"""Step times of an experiment's models alone: measured in its own windows, or read from files of `bench.step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.experiment_case import CaseError
from trouterd.batching.measured import read_step_time
from trouterd.batching.network import NetworkError, StepTime
from trouterd.batching.row_time import RowTime


class StepTimes:
    """Grows as windows of single models are measured.

    Args:
        given: by model; those count, whatever is measured.
    """

    def __init__(self, given: Mapping[str, RowTime] | None = None) -> None:
        self._given = dict(given or {})
        self._points: dict[tuple[str, str], dict[float, float]] = {}

    @classmethod
    def read(cls, names: Sequence[str], files: Sequence[Path], context: int) -> StepTimes:
        """From files of `bench.step`, one per model in order; none at all is allowed.

        Raises:
            NetworkError: too few files or too many, or one that cannot be used.
        """
        if files and len(files) != len(names):
            raise NetworkError(f"--step: {len(files)} files for the models {', '.join(names)}")
        return cls({name: read_step_time(path, context).time for name, path in zip(names, files, strict=False)})

    def add(self, workload: str, name: str, batch: float, seconds: float) -> None:
        """What a window of that model alone has shown."""
        self._points.setdefault((workload, name), {})[round(batch, 3)] = seconds

    def of(self, workload: str, names: Sequence[str]) -> list[RowTime]:
        """Of these models, in order; windows of a model alone tell nothing of several rows per request.

        Raises:
            CaseError: of one of them nothing is known.
        """
        return [self._of(workload, name) for name in names]

    def _of(self, workload: str, name: str) -> RowTime:
        if name in self._given:
            return self._given[name]
        points = self._points.get((workload, name))
        if not points:
            raise CaseError(f"no step time of the model {name}: let it be measured alone before, or give --step")
        return RowTime(StepTime(tuple(sorted(points.items()))))
