"""The two models of a frontier and the daemon's configuration of a sweep over them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.frontier_fault import FrontierUsageError
from bench.frontier_sweeps import Sweep
from trouterd.config import Config, Route
from trouterd.config_dump import dump
from trouterd.settings import ConfigError, load

PREFIX = "frontier-"
"""Of the names of routes that are made for a sweep."""
TRAINING = f"{PREFIX}pair"
"""The route that heads are trained for."""
_LOG_LEVEL: Literal["warning"] = "warning"
"""A line for every answer would only hide the progress bar."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A small and a large model that this program serves itself."""

    small: str
    large: str
    config: Config
    """With both models, and routes of the user's that are swept too."""
    device: str = "cpu"
    """The large model's."""
    routes: Mapping[str, str] = field(default_factory=dict)
    """The user's routes over these two models -> algorithm."""

    def configuration(self, sweeps: Iterable[Sweep], checkpoints: Mapping[str, Path]) -> str:
        """TOML with a route for every sweep, named by `PREFIX`, and one to train for.

        Args:
            sweeps: those with a head must have a checkpoint.
            checkpoints: sweep -> file.
        """
        routes: dict[str, Route] = {name: self.config.routes[name] for name in self.routes}
        routes[TRAINING] = self._route("none", {})
        for sweep in sweeps:
            if not sweep.route:
                params = sweep.params(str(checkpoints[sweep.name].resolve()) if sweep.head else "")
                routes[PREFIX + sweep.name] = self._route(sweep.algorithm, params)
        return dump(msgspec.structs.replace(self.config, routes=routes))

    def _route(self, algorithm: str, params: Mapping[str, Any]) -> Route:
        return Route(models=[self.small, self.large], algorithm=algorithm, params=dict(params), on_peer_loss="fail")


def demo_pair() -> Pair:
    """The built-in pair. Without a prefix cache: points that come later must not find the prompts of earlier ones computed."""
    models = {name: {"path": f"builtin:{name}", "prefix_cache": False} for name in ("small", "large")}
    config = load(None, {}, given={"server": {"log_level": _LOG_LEVEL}, "models": models})
    return Pair("small", "large", config)


def configured_pair(path: Path, route: str) -> Pair:
    """The two models of a route of a configuration; the daemon listens on unix sockets of ours alone.

    Raises:
        FrontierUsageError: the configuration is at fault, or has no such route of two models.
    """
    try:
        config = load(path, os.environ)
    except ConfigError as error:
        raise FrontierUsageError("\n".join(error.problems)) from error
    if route not in config.routes or len(config.routes[route].models) != 2:
        known = ", ".join(name for name, one in config.routes.items() if len(one.models) == 2) or "none"
        raise FrontierUsageError(f"--route {route}: {path} has no such route of two models; there are: {known}")
    small, large = config.routes[route].models
    routes = {name: one for name, one in config.routes.items() if one.models == [small, large]}
    kept = msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, listen="", api_key_file="", log_level=_LOG_LEVEL),
        models={name: config.models[name] for name in (small, large)},
        routes=routes,
    )
    device = config.models[large].device
    return Pair(small, large, kept, device, {name: one.algorithm for name, one in routes.items()})
