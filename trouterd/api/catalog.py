"""What `model` may name: every configured route and every single model, with the tokenizer and the context of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from models.tokenizer import Tokenizer
from trouterd.api.errors import RequestError
from trouterd.config import Config, Route

_ROUTER_NAME = re.compile(r"router-(?P<route>.+)-(?P<threshold>[0-9]+(\.[0-9]+)?)", re.ASCII)


class TokenizerMismatch(ValueError):  # noqa: N818 - a mismatch, named after what it is
    """Two models of one route have different tokenizers."""


@dataclass(frozen=True, slots=True)
class Served:
    """One public name."""

    name: str
    models: tuple[str, ...]
    """The route's order; the first is the entry."""
    tokenizer: Tokenizer
    root: str
    """Path of the entry model: bench tools load a tokenizer from it."""
    algorithm: str
    params: Mapping[str, Any]
    """The algorithm's, as configured."""
    needs_peers: bool
    """The loss of any model, not only of the entry, makes the route unavailable (on_peer_loss = fail)."""

    @property
    def entry(self) -> str:
        """Name of the entry model, which is also its worker's."""
        return self.models[0]


class Catalog:
    """All public names.

    Args:
        config: models and routes.
        tokenizers: one per model.
        contexts: context length per model, tokens; read at every request, so that its owner may refine it later.

    Raises:
        TokenizerMismatch: naming route, both models and the first difference.
    """

    def __init__(self, config: Config, tokenizers: Mapping[str, Tokenizer], contexts: MutableMapping[str, int]) -> None:
        self._tokenizers = tokenizers
        self.contexts = contexts
        self._served: dict[str, Served] = {}
        for name, route in config.all_routes().items():
            self._check_tokenizers(name, route)
        self.configure(config)

    def _check_tokenizers(self, name: str, route: Route) -> None:
        entry = route.models[0]
        for peer in route.models[1:]:
            difference = self._tokenizers[entry].first_difference(self._tokenizers[peer])
            if difference is not None:
                raise TokenizerMismatch(
                    f"route '{name}': the tokenizers of models '{entry}' and '{peer}' differ: {difference}; "
                    "models of one route must share a tokenizer"
                )

    def configure(self, config: Config) -> None:
        """Take over the live settings of a changed configuration."""
        routes = config.all_routes()
        # Configured routes first: clients that take the first model of the list get the product, not a part of it.
        self._served = {name: self._serve(name, routes[name], config) for name in [*config.routes, *config.models]}

    def _serve(self, name: str, route: Route, config: Config) -> Served:
        entry = route.models[0]
        return Served(
            name=name,
            models=tuple(route.models),
            tokenizer=self._tokenizers[entry],
            root=config.models[entry].path,
            algorithm=route.algorithm,
            params=route.params,
            needs_peers=route.on_peer_loss == "fail",
        )

    def __iter__(self) -> Iterator[Served]:
        """Configured routes, then single models, in the configuration's order."""
        return iter(self._served.values())

    def get(self, name: str) -> Served:
        """The route of a request.

        Raises:
            RequestError: 404 `model_not_found`.
        """
        served = self._served.get(name)
        if served is None:
            known = ", ".join(repr(known) for known in self._served)
            raise RequestError(
                404, "model_not_found", f"the model {name[:128]!r} does not exist; there are {known}", param="model"
            )
        return served

    def address(self, name: str) -> tuple[Served, float | None]:
        """The route behind a request's `model`, and the threshold that the name carries: `router-<route>-<threshold>`, the form
        of RouteLLM's clients, is that route with that threshold, unless something is called so.

        Raises:
            RequestError: 404 `model_not_found`.
        """
        named = None if name in self._served else _ROUTER_NAME.fullmatch(name)
        if named is None or named["route"] not in self._served:
            return self.get(name), None
        return self._served[named["route"]], float(named["threshold"])

    def default(self) -> Served:
        """The first of them: for requests that may omit `model`."""
        return next(iter(self))

    def context(self, served: Served) -> int:
        """The smallest context length of the route's models, tokens."""
        return min(self.contexts[model] for model in served.models)
