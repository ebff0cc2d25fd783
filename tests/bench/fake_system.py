"""A system under test for runs of experiments, and their clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

from bench.experiment_case import Case, CaseError, Measure, Record, Stage, cost
from bench.experiment_join import joined
from bench.experiment_result import Result, ResultFile
from bench.experiment_routes import Routes
from bench.experiment_run import Runner
from bench.experiment_steps import StepTimes
from bench.progress import Progress
from bench.target import Target
from tests.bench.experiment_fakes import result, window

SECONDS = 10.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Fake:
    """A system under test, and the clock that measuring it moves."""

    clock: Clock
    started: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    broken: str = ""
    printed: StringIO = field(default_factory=StringIO)

    def record(self, one: Case, measure: Measure) -> Record:
        if one.key == self.broken:
            raise CaseError("no such route")
        target = Target(one.system, "unix:/nowhere", one.subject, 1)
        return Record(one, measure(target, one), {"predicted": 5.0, "thresholds": {"small": 1, "large": one.streams}})

    def measure(self, target: Target, one: Case) -> dict[str, Any]:
        assert target.model == one.subject
        self.asked.append(one.key)
        self.clock.now += cost(one, SECONDS)
        return window(one, 100.0)

    def stage(self, name: str, cases: list[Case], seconds: float = 30.0) -> Stage:
        @contextmanager
        def start(folder: Path, routes: Routes) -> Iterator[Fake]:
            assert folder.is_dir()
            self.started.append(name)
            self.clock.now += seconds
            yield self

        return Stage(name, seconds, start, tuple(cases), daemon=name)

    def run(self, stages: list[Stage], path: Path, budget: float = 1e9, steps: StepTimes | None = None) -> Result:
        """Experiment a alone."""
        (made,) = self.run_together({"a": stages}, {"a": path}, budget, steps)
        return made

    def run_together(
        self,
        experiments: Mapping[str, list[Stage]],
        paths: Mapping[str, Path],
        budget: float = 1e9,
        steps: StepTimes | None = None,
    ) -> list[Result]:
        stages = joined(experiments)
        made = [replace(result(letter, []), complete=False) for letter in experiments]
        Runner(
            stages,
            [ResultFile(one, path) for one, path in zip(made, paths.values(), strict=True)],
            seconds=SECONDS,
            budget=budget,
            measure=self.measure,
            steps=steps or StepTimes(),
            progress=Progress(sum(len(stage.cases) for stage in stages), self.printed),
            clock=self.clock,
        ).run()
        return made
