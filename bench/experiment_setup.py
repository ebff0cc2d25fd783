"""The models of an experiment, where they run, and how: the same for all of its daemons."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from bench.deployment import SCRIPT, Deployment, ModelSpec, RouteSpec
from bench.experiment_case import LARGE, MIDDLE, SMALL, CaseError
from bench.experiment_settings import FLAG, Settings
from bench.patterns import Mixture, Pattern
from bench.step_heads import HeadInputs
from bench.step_shapes import SHAPES, write_shape
from models.config import ModelConfig
from trouterd.batching.placement import FASTER, SEPARATE, SHARED, SLOWER
from trouterd.config import Config
from trouterd.config_dump import toml_value
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.settings import BUILTIN, ConfigError, load

CPU = "cpu"
BUILTIN_DIRECTORIES = {f"{BUILTIN}small": SMALL_DIRECTORY, f"{BUILTIN}large": LARGE_DIRECTORY}


@dataclass(frozen=True, slots=True)
class Setup:
    """Two models, or three with one in the middle.

    Args:
        sources: of `ModelSpec`, entry first.
        devices: one per model.
        tensor_parallel: GPUs of each model.
        settings: of all daemons.
        handoff: seconds of one, for plans.
        given_contention: for plans, one factor per model; empty: what is known beforehand.
    """

    sources: tuple[str, ...]
    devices: tuple[str, ...]
    tensor_parallel: tuple[int, ...]
    settings: Settings = Settings()
    handoff: float = 0.0
    given_contention: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the models in the configuration."""
        return (SMALL, MIDDLE, LARGE) if len(self.sources) == 3 else (SMALL, LARGE)

    @property
    def pair(self) -> str:
        """For tables and file names: the models' sources in short, with the number of their GPUs where it is not one."""
        columns = zip(self.sources, self.tensor_parallel, strict=True)
        return "+".join(short(source) + (f"-TP{gpus}" if gpus > 1 else "") for source, gpus in columns)

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """All of them."""
        columns = zip(self.names, self.sources, self.devices, self.tensor_parallel, strict=True)
        return tuple(ModelSpec(*row, settings=self.settings.model_lines(row[0])) for row in columns)

    @property
    def placement(self) -> str:
        """`shared`, `separate`, or `cpu` where no model is on a GPU."""
        gpus = [model.gpus for model in self.models]
        if not any(gpus):
            return CPU
        return SHARED if len(frozenset().union(*gpus)) < sum(map(len, gpus)) else SEPARATE

    @property
    def contention(self) -> tuple[float, ...]:
        """By how much another running model prolongs a step, as it is given, or known beforehand: the last model is the slowest."""
        if self.given_contention:
            return self.given_contention
        if self.placement != SHARED:
            return ()
        return (*(FASTER for _ in self.sources[1:]), SLOWER)

    @property
    def has_heads(self) -> bool:
        """Whether routing heads run beside the small model."""
        return not self.sources[0].startswith(SCRIPT)

    @property
    def takes_turns(self) -> bool:
        """Models run one at a time, whatever the window."""
        return self.settings.values.get("batching.overlap") is False

    def deployment(
        self, routes: Sequence[RouteSpec] = (), *, own: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> Deployment:
        """What a daemon of this experiment serves.

        Args:
            routes: over its models.
            own: by model, further lines of its table, which count before those of the command line.
        """
        models = [replace(model, settings=(*model.settings, *own.get(model.name, ()))) for model in self.models]
        return Deployment(tuple(models), tuple(routes), self.settings.lines())

    def check(self) -> None:
        """Whether what was set fits together; whether models are there is not looked at.

        Raises:
            CaseError: it does not; the message says why.
        """
        if not self.settings.values:
            return
        with tempfile.TemporaryDirectory() as name:
            try:
                self.config(Path(name))
            except ConfigError as error:
                own = [problem for problem in error.problems if problem.startswith(tuple(self.settings.values))]
                if own:
                    raise CaseError("; ".join(f"{FLAG} {problem}" for problem in own)) from error

    def config(self, folder: Path) -> Config:
        """Of a daemon without routes; whether models are there is not looked at.

        Args:
            folder: for files of the models.

        Raises:
            ConfigError: it is none; problems begin with the key.
        """
        file = folder / "trouterd.toml"
        file.write_text(self.deployment().configuration(folder))
        try:
            return load(file, {})
        except ConfigError as error:
            raise ConfigError([problem.removeprefix(f"{file}: ") for problem in error.problems]) from error

    def route(self, pattern: Pattern | Mixture, folder: Path, *, heads: bool = True) -> RouteSpec:
        """The route of a pattern; writes its head into the folder, or leaves it out."""
        models = self.names if isinstance(pattern, Mixture) else (SMALL, LARGE)
        params = pattern.route_params(folder, head_inputs(self.sources[0]) if heads else None, self.devices[0])
        return RouteSpec(pattern.route, models, pattern.algorithm_path, inline(params))


def short(source: str) -> str:
    """A source's name in few letters, fit for a file's name."""
    if source.startswith(SCRIPT):
        return source.replace(":", "-")
    return Path(source.removeprefix(BUILTIN)).name


def inline(params: dict[str, object]) -> str:
    """The content of a TOML inline table."""
    return ", ".join(f"{name} = {toml_value(value)}" for name, value in params.items())


def head_inputs(source: str) -> HeadInputs | None:
    """What a model gives a routing head; None for a script, which has no weights."""
    if source.startswith(SCRIPT):
        return None
    config = model_config(source)
    return HeadInputs(config.hidden_size, config.hidden_size, config.vocab_size)


def model_config(source: str) -> ModelConfig:
    """Of a source that is no script.

    Raises:
        models.config.ModelError: it is not of a known family, or is not there.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = (
            write_shape(source, Path(name)) if source in SHAPES else BUILTIN_DIRECTORIES.get(source, Path(source))
        )
        return ModelConfig.load(directory)
