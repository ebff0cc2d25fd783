"""The large model by itself: a daemon of that one model, as somebody would serve it who does not route.

In the daemon that routes, the small model of a shared GPU has the persistent kernel, and both share the multiprocessors; a large
model that is asked there by its name is not the best that the machine can do without routing. By itself it has that kernel and the
whole GPU; without the kernel it decodes large batches faster; and where there are several GPUs it can be spread over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.deployment import SCRIPT, Deployment, Fleet, ModelSpec, serving
from bench.experiment_case import ITSELF, LARGE, Case, Measure, Record, Stage
from bench.experiment_routes import Routes
from bench.experiment_scope import REFERENCE, Scope
from bench.experiment_setup import Setup, model_config
from models.config import ModelError
from models.cuda.shard import Shard

NO_KERNEL = f"{ITSELF} no megakernel"
_OVERLAP = ("[batching]\noverlap = true",)
"""Taking turns is for several models; for one that is alone nobody waits."""
_LESS = 20
"""Importance that every way but the first costs."""


class OpenedItself:
    """A running daemon of the large model.

    Args:
        fleet: the daemon.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._target = replace(fleet.targets[LARGE], large=LARGE)

    def record(self, case: Case, measure: Measure) -> Record:
        """See `Opened`; nothing waits for company, since nothing is handed over."""
        return Record(case, measure(self._target, case))


def by_itself(scope: Scope, cases: Sequence[Case]) -> list[Stage]:
    """A daemon for each way to serve the large model alone.

    Args:
        scope: of the experiment.
        cases: windows of the routed daemon; those of the large model are asked for here again.
    """
    asked = [case for case in cases if case.subject == LARGE]
    found = []
    for place, (system, model) in enumerate(ways(scope.setup)):
        own = [
            replace(case, system=system, importance=case.importance + (_LESS if place else REFERENCE)) for case in asked
        ]
        deployment = Deployment((model,), (), (*scope.setup.deployment().settings, *_OVERLAP))
        found.append(Stage(system, scope.start, partial(_opened, deployment), tuple(own), deployment))
    return found


def ways(setup: Setup) -> list[tuple[str, ModelSpec]]:
    """Names of systems, and the large model of each."""
    large = setup.models[-1]
    found = [(ITSELF, large)]
    if large.gpus and large.tensor_parallel == 1:
        found.append((NO_KERNEL, replace(large, settings=(*large.settings, 'megakernel = "off"'))))
    if spread := _spread(setup, large):
        found.append((f"{ITSELF} TP{spread.tensor_parallel}", spread))
    return found


def _spread(setup: Setup, large: ModelSpec) -> ModelSpec | None:
    """The model over all GPUs of the experiment; None where they are no power of two in a row, or its shape cannot be split so."""
    gpus = sorted(frozenset().union(*(model.gpus for model in setup.models)))
    world = len(gpus)
    if world <= large.tensor_parallel or world & (world - 1) or gpus[-1] - gpus[0] != world - 1:
        return None
    if large.source.startswith(SCRIPT):
        return None
    try:
        Shard(0, world).check(model_config(large.source), large.source)
    except ModelError:
        return None
    return replace(large, device=f"cuda:{gpus[0]}", tensor_parallel=world)


@contextmanager
def _opened(deployment: Deployment, folder: Path, _: Routes) -> Iterator[OpenedItself]:
    with serving(deployment, folder) as fleet:
        yield OpenedItself(fleet)
