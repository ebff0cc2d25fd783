"""What to serve for a measurement, and a trouterd that serves it: models, routes, settings, and a target for each name.

Everything that differs between measurements is data here, so that an experiment that runs on scripted steps in seconds runs on real
models by its arguments alone.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.counters import over_control, steps_over_control
from bench.daemon import Link, Served, running
from bench.fetch import UNIX
from bench.step_shapes import SHAPES, write_shape
from bench.step_tokenizer import write_tokenizer
from bench.target import Counters, Target
from trouterd.batching.launch import clamp
from trouterd.config import Model
from trouterd.config_dump import toml_value
from trouterd.demo import SMALL_DIRECTORY
from trouterd.settings import BUILTIN, merge

SCRIPT = "script:"
READY_TIMEOUT = 600.0
"""Seconds that a daemon gets to load its models, and to compile kernels at its first start."""
RESTART_TIMEOUT = 180.0
"""The same for a process that has ended while its daemon serves."""
_LOOK = 0.2
_LETTERS = 64
"""Ids of a script: ordinary ones of the vocabulary, others for each model."""
SCRIPT_TOKENS = 1 << 16
"""Context of a scripted model."""
_NAMED = ("models", "routes")
"""Sections with a table per name."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model."""

    name: str
    source: str
    """A directory, `builtin:small` or `builtin:large`, a published shape (`bench.step_shapes`; random weights, on a GPU), or
    `script:MS`: no model, steps of so many milliseconds whatever they hold."""
    device: str = "cpu"
    tensor_parallel: int = 1
    settings: tuple[str, ...] = ()
    """Further lines of its table, such as `depth = 1`; each is complete, and the last one of a key counts."""

    @property
    def gpus(self) -> frozenset[int]:
        """The GPUs that it is on."""
        scripted = self.source.startswith(SCRIPT)
        model = Model(
            path=self.source,
            format="script" if scripted else "hf",
            device=self.device,
            tensor_parallel=self.tensor_parallel,
        )
        return frozenset(model.gpus)


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route."""

    name: str
    models: tuple[str, ...]
    """The entry first, the large one last."""
    algorithm: str
    """A name, or the path of a file."""
    params: str = ""
    """Content of a TOML inline table, such as `p = 0.35`."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What one daemon serves."""

    models: tuple[ModelSpec, ...]
    routes: tuple[RouteSpec, ...] = ()
    settings: tuple[str, ...] = ()
    """Further lines of the configuration, such as `batching.mode = "eager"`, or `[batching]` and its lines behind it."""

    def model(self, name: str) -> ModelSpec:
        """A model by its name. Raises KeyError."""
        return {model.name: model for model in self.models}[name]

    def route(self, name: str) -> RouteSpec:
        """A route by its name. Raises KeyError."""
        return {route.name: route for route in self.routes}[name]

    def gpus(self, names: Iterable[str]) -> int:
        """GPUs that these models take; a model on no GPU stands for one with one of its own."""
        models = [self.model(name) for name in names]
        return len(frozenset().union(*(model.gpus for model in models))) + sum(not model.gpus for model in models)

    def configuration(self, files: Path) -> str:
        """The text of trouterd.toml.

        Args:
            files: folder for what models are made of here: scripts, shapes, a tokenizer.
        """
        tree: dict[str, Any] = {"server": {}, "models": {}, "routes": {}}
        for place, model in enumerate(self.models):
            table = _source(model, place, files) | {"device": model.device, "tensor_parallel": model.tensor_parallel}
            merge(table, _parsed(model.settings))
            tree["models"][model.name] = table
        for route in self.routes:
            params = tomllib.loads(f"params = {{ {route.params} }}")
            tree["routes"][route.name] = {"models": list(route.models), "algorithm": route.algorithm} | params
        merge(tree, _parsed(self.settings))
        return _toml(tree)


def _source(model: ModelSpec, place: int, files: Path) -> dict[str, Any]:
    """The keys that say what a model is; writes its files."""
    files.mkdir(parents=True, exist_ok=True)
    if model.source.startswith(SCRIPT):
        script = _write_script(files / f"{model.name}.json", place, float(model.source.removeprefix(SCRIPT)))
        return {"path": str(script), "format": "script", "tokenizer": str(SMALL_DIRECTORY)}
    if model.source in SHAPES:
        tokenizer = files / "tokenizer"
        if not tokenizer.is_dir():
            write_tokenizer(tokenizer)
        shape = write_shape(model.source, files / model.name)
        return {"path": str(shape), "tokenizer": str(tokenizer), "load_format": "dummy"}
    return {"path": model.source if model.source.startswith(BUILTIN) else str(Path(model.source).resolve())}


def _write_script(path: Path, place: int, delay_ms: float) -> Path:
    first = 100 * (place + 1)
    script = {
        "vocab_size": json.loads((SMALL_DIRECTORY / "config.json").read_text())["vocab_size"],
        "eos": 0,
        "ids": list(range(first, first + _LETTERS)),
        "cycle": True,
        "delay_ms": delay_ms,
        "context_length": SCRIPT_TOKENS,
        "num_pages": SCRIPT_TOKENS,
    }
    path.write_text(json.dumps(script))
    return path.resolve()


def _parsed(lines: Iterable[str]) -> dict[str, Any]:
    """Lines of TOML as a tree; where a key comes twice, the last one counts."""
    tree: dict[str, Any] = {}
    table = ""
    for line in (part for item in lines for part in item.splitlines()):
        if line.lstrip().startswith("["):
            table = line
        else:
            merge(tree, tomllib.loads(f"{table}\n{line}"))
    return tree


def _toml(tree: Mapping[str, Any]) -> str:
    """A configuration's tree as text."""
    lines = []
    for section, content in tree.items():
        tables = {f"{section}.{toml_value(name)}": table for name, table in content.items()}
        for head, table in (tables if section in _NAMED else {section: content}).items():
            lines += [f"[{head}]", *(f"{key} = {toml_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


class Fleet:
    """A running daemon of a deployment.

    Args:
        deployment: what it serves.
        served: its sockets.
        link: its control connection.
    """

    def __init__(self, deployment: Deployment, served: Served, link: Link) -> None:
        self.deployment = deployment
        self.served = served
        self._link = link
        large = {route.models[-1] for route in deployment.routes}
        names = {model.name: (model.name,) for model in deployment.models}
        routes = {route.name: route.models for route in deployment.routes}
        self.targets = {
            name: self._target(name, models, models[-1] if models[-1] in large else "")
            for name, models in (names | routes).items()
        }
        """By name: every model alone, and every route. `large` is the model that a route ends with."""

    def _target(self, name: str, models: tuple[str, ...], large: str) -> Target:
        return Target(
            name=f"trouterd {name}",
            url=f"{UNIX}{self.served.socket}",
            model=name,
            gpus=self.deployment.gpus(models),
            counters=lambda: self.counters(models),
            steps=steps_over_control(self._link, models),
            large=large,
        )

    def counters(self, models: Sequence[str]) -> Counters:
        """Totals of these models.

        Raises:
            RuntimeError: one of them does not answer.
        """
        return over_control(self._link, models)()

    def live(self, key: str, value: Any) -> Any:
        """Change a live setting, as `trouterctl set` does; returns the old value.

        Raises:
            RuntimeError: it was refused.
        """
        return self._link.call("set", key=key, value=value)["old"]

    @contextmanager
    def holding(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Live settings that are in force inside the block, set in this order; afterwards the old ones are, in turn from the last.

        Raises:
            RuntimeError: one was refused.
        """
        with ExitStack() as stack:
            for key, value in settings.items():
                stack.callback(self.live, key, self.live(key, value))
            yield

    def wait_ready(self, seconds: float = RESTART_TIMEOUT) -> None:
        """Until all of its processes are up: one that has ended is started again, which takes a large model half a minute.

        Raises:
            RuntimeError: that takes longer, or the daemon is about to end.
        """
        deadline = time.monotonic() + seconds
        while (state := self.call("status")["state"]) != "ready":
            if state == "draining" or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon is {state}, and not ready")
            time.sleep(_LOOK)

    def call(self, verb: str) -> Any:
        """What a control verb answers. Raises RuntimeError."""
        return self._link.call(verb)

    def pin(self, thresholds: Mapping[str, int], count: int) -> None:
        """Launch by these thresholds, and by nothing that is learned, until `batching.mode` is set again.

        Args:
            thresholds: by model, for `count` active requests; they are lowered for fewer. Models that are not named: 1.
            count: active requests.

        Raises:
            RuntimeError: requests could wait for each other, or more are asked for than are active.
        """
        for model in self.deployment.models:
            self.live(f"models.{model.name}.thresholds", [])
        together = tuple(thresholds.values())
        for place, (name, threshold) in enumerate(thresholds.items()):
            values = [clamp(together, active)[place] for active in range(1, count)] + [threshold]
            self.live(f"models.{name}.thresholds", values)
        self.live("batching.mode", "manual")


@contextmanager
def serving(deployment: Deployment, folder: Path, *, ready_timeout: float = READY_TIMEOUT) -> Iterator[Fleet]:
    """A daemon of this deployment, ready; drained at the end.

    Args:
        deployment: what it serves.
        folder: for files of models, its configuration and its sockets, whose paths may have 107 bytes.
        ready_timeout: seconds.

    Raises:
        trouterd.daemon.DaemonError: it did not start; it has said why on standard error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = deployment.configuration(folder)
    with running(folder, config, ready_timeout=ready_timeout) as served, fleet_of(deployment, served) as fleet:
        yield fleet


@contextmanager
def fleet_of(deployment: Deployment, served: Served) -> Iterator[Fleet]:
    """A running daemon of a deployment."""
    with closing(Link(served)) as link:
        fleet = Fleet(deployment, served, link)
        # A line for every answer would cost more than the answer where each has one token.
        fleet.live("server.log_level", "warning")
        yield fleet
