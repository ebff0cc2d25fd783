"""What the api reads from disk at its start: context lengths, and the algorithms behind `route.params`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelError
from models.shape import load_shape
from trouterd.api.schema import Overrides
from trouterd.config import Config, Model, Route

if TYPE_CHECKING:
    from algorithms.base import Definition


def context_lengths(config: Config) -> dict[str, int]:
    """Largest prompt + output per model, tokens.

    Raises:
        ModelError: naming the file.
    """
    return {name: model.context_length or _own_context(model) for name, model in config.models.items()}


def _own_context(model: Model) -> int:
    if model.format == "hf":
        return load_shape(Path(model.path)).context_length
    from models.script import ScriptError, ScriptRunner

    try:
        return ScriptRunner.load(Path(model.path)).context_length
    except ScriptError as error:
        raise ModelError(str(error)) from error


class ParamChecks:
    """Range checks of per-request algorithm parameters.

    The algorithms need torch, whose import takes seconds; it happens in a thread at the first override, so that an api
    that comes back after a crash serves at once and one that sees no override never pays for it.
    """

    def __init__(self, config: Config) -> None:
        self.configure(config)
        self._definitions: dict[str, Definition] = {}
        """By name or path: a file of a user's is run once, as in the workers, however often it is asked for."""
        self._lock = asyncio.Lock()

    def configure(self, config: Config) -> None:
        """Overrides are laid over this configuration's parameters from now on."""
        self._routes = config.all_routes()

    async def __call__(self, name: str, params: Overrides) -> dict[str, float]:
        """The overrides of a route as the workers take them.

        Raises:
            ValueError: unknown, not numeric or out of range.
        """
        async with self._lock:
            return await asyncio.to_thread(self._check, self._routes[name], params)

    def _check(self, route: Route, params: Overrides) -> dict[str, float]:
        from algorithms.registry import AlgorithmError, check_overrides, load

        algorithm = route.algorithm

        try:
            if algorithm not in self._definitions:
                self._definitions[algorithm] = load(algorithm)
            return check_overrides(self._definitions[algorithm], route.params, route.models, params)
        except AlgorithmError as error:
            raise ValueError(str(error)) from error
