"""The stage of an experiment that is Std. Serving on servers of its own, a daemon for each model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.experiment_case import Case, CaseError, Measure, Record
from bench.experiment_fleet import routes_of
from bench.experiment_setup import Setup
from bench.patterns import Mixture, Pattern
from bench.std_serving import DispatcherError, std_serving
from bench.target import Target


class OpenedServers:
    """Servers and their dispatcher.

    Args:
        targets: by route.
        patterns: by key.
    """

    def __init__(self, targets: Mapping[str, Target], patterns: Mapping[str, Pattern | Mixture]) -> None:
        self._targets, self._patterns = targets, patterns

    def record(self, case: Case, measure: Measure) -> Record:
        """See `Opened`."""
        pattern = self._patterns[case.subject]
        target = self._targets[pattern.route]
        return Record(case, measure(replace(target, body={**target.body, **pattern.body}), case))


@contextmanager
def opened_servers(setup: Setup, folder: Path, patterns: Sequence[Pattern | Mixture]) -> Iterator[OpenedServers]:
    """Serve the models, and decide for all patterns outside of them; no head can run there."""
    folder.mkdir(parents=True, exist_ok=True)
    deployment = setup.deployment(routes_of(setup, patterns, folder, heads=False))
    try:
        with std_serving(deployment, folder) as targets:
            yield OpenedServers(targets, {pattern.key: pattern for pattern in patterns})
    except (DispatcherError, ValueError) as error:
        raise CaseError(str(error)) from error
