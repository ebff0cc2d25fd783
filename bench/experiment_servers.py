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
from trouterd.batching.placement import SHARED


class OpenedServers:
    """Servers and their dispatcher.

    Args:
        targets: by route.
        patterns: that are asked for.
    """

    def __init__(self, targets: Mapping[str, Target], patterns: Sequence[Pattern | Mixture]) -> None:
        self._targets, self._patterns = targets, {pattern.key: pattern for pattern in patterns}

    def record(self, case: Case, measure: Measure) -> Record:
        """See `Opened`."""
        pattern = self._patterns[case.subject]
        target = self._targets[pattern.route]
        return Record(case, measure(replace(target, body={**target.body, **pattern.body}), case))


_PART = 0.95
"""Of the KV pools of one daemon, for those of several: each has some memory of its own."""


@contextmanager
def opened_servers(
    setup: Setup, folder: Path, patterns: Sequence[Pattern | Mixture], pools: Mapping[str, int]
) -> Iterator[OpenedServers]:
    """Serve the models, and decide for all patterns outside of them; no head can run there.

    Args:
        setup: the models.
        folder: for everything.
        patterns: whose moves are drawn.
        pools: tokens of the KV pools that one daemon of these models had; daemons that share a GPU cannot agree on theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    routes = routes_of(setup, patterns, folder, heads=False)
    deployment = setup.deployment(routes, own=_pools(setup, pools))
    try:
        with std_serving(deployment, folder) as targets:
            yield OpenedServers(targets, patterns)
    except (DispatcherError, ValueError) as error:
        raise CaseError(str(error)) from error


def _pools(setup: Setup, pools: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Settings by model, where models share a GPU and nothing is said of their pools."""
    if setup.placement != SHARED:
        return {}
    silent = [name for name in setup.names if "kv_tokens" not in setup.settings.of_model(name)]
    return {name: (f"kv_tokens = {int(_PART * pools[name])}",) for name in silent if name in pools}
