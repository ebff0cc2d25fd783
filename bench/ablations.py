"""trouterd without one of its parts: named variations of a deployment, by keys of the configuration alone.

| name | without |
|---|---|
| no graphs | CUDA graphs: every kernel is launched by the host (the persistent kernel is one launch either way) |
| no extend graphs | graphs of steps that feed several tokens of a request, which a hand-off brings |
| no async | models side by side: they take turns, and none queues a step while another one waits |
| no delayed batching | waiting for company: whatever is ready is launched |
| no multi-step | steps queued behind the running one |
| no MPS | kernels of two models side by side on one GPU; there is nothing to leave out where no GPU is shared |

Several names together leave out all of them. Those whose keys are live can be measured on a daemon that runs (`without`); the
others need a start of their own (`ablated`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bench.deployment import Deployment, Fleet
from trouterd.config_dump import toml_value
from trouterd.settings import live_keys


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is set."""

    models: Mapping[str, Any] = field(default_factory=dict)
    """Keys of every model's table."""
    daemon: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the configuration."""

    @property
    def is_live(self) -> bool:
        """It takes no start."""
        return not self.models and self.daemon.keys() <= set(live_keys())


ABLATIONS: Mapping[str, Ablation] = {
    "no graphs": Ablation(models={"graphs": False}),
    "no extend graphs": Ablation(models={"extend_graphs": False}),
    "no async": Ablation(daemon={"batching.overlap": False}),
    "no delayed batching": Ablation(daemon={"batching.mode": "eager"}),
    "no multi-step": Ablation(models={"depth": 1}),
    "no MPS": Ablation(daemon={"gpu.mps": "off"}),
}


def ablated(deployment: Deployment, *names: str) -> Deployment:
    """The deployment without these parts, whatever its own settings say of them. Raises KeyError for a name that there is not."""
    chosen = [ABLATIONS[name] for name in names]
    lines = tuple(f"{key} = {toml_value(value)}" for one in chosen for key, value in one.models.items())
    tables = tuple(_table(key, value) for one in chosen for key, value in one.daemon.items())
    return replace(
        deployment,
        models=tuple(replace(model, settings=model.settings + lines) for model in deployment.models),
        settings=deployment.settings + tables,
    )


@contextmanager
def without(fleet: Fleet, *names: str) -> Iterator[None]:
    """The running daemon without these parts inside the block.

    Raises:
        ValueError: one of them takes a start.
    """
    if fixed := [name for name in names if not ABLATIONS[name].is_live]:
        raise ValueError(f"{', '.join(fixed)}: fixed at the start of a daemon; serve an ablated deployment")
    with fleet.holding({key: value for name in names for key, value in ABLATIONS[name].daemon.items()}):
        yield


def _table(key: str, value: Any) -> str:
    """A key with its table's head, whatever table the lines before it were in."""
    table, _, name = key.rpartition(".")
    return f"[{table}]\n{name} = {toml_value(value)}"
