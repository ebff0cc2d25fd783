"""A route as one worker sees it: who is behind each destination number, and the algorithm's side that runs here."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch

from algorithms.base import Algorithm, Definition, RouteContext
from algorithms.drafting import Drafter
from algorithms.registry import AlgorithmError, load, numeric_params, validate_params
from trouterd.config import Config, Route


@dataclass(slots=True, eq=False)
class WorkerRoute:
    """Everything the decode loop asks a route for; live parameters are replaced in place between two steps."""

    name: str
    models: tuple[str, ...]
    workers: tuple[int, ...]
    """Worker index per model of the route."""
    side: int
    """Route index of this worker's model."""
    eos_ids: frozenset[int]
    """Union over the route's models: any of them ends the request, whoever wrote it."""
    context: RouteContext
    algorithm: Algorithm
    definition: Definition
    params: dict[str, float]
    """The numeric parameters in force; per-request overrides are laid over them."""
    on_peer_loss: str
    max_stall: int
    version: int = 0
    """Rises with every live change of the parameters."""
    stay_rate: float = 1.0
    """Share of this side's latest decisions that kept the request here; steps are queued ahead by it."""
    drafts: bool = field(init=False)
    """Tokens that this side writes are drafts."""
    sends_all: bool = field(init=False)
    """The algorithm leaves what travels to the default: what the receiver has not seen."""
    accepts_all: bool = field(init=False)
    """The same of what is taken: all of it."""

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        self.drafts = isinstance(algorithm, Drafter)
        # Also an instance may carry a function of its own.
        self.sends_all = getattr(algorithm.send, "__func__", None) is Algorithm.send
        self.accepts_all = getattr(algorithm.receive, "__func__", None) is Algorithm.receive

    def model_at(self, destination: int) -> int:
        """Route index behind a destination number (0 = this side, k = the k-th other model)."""
        if destination == 0:
            return self.side
        return destination - 1 if destination <= self.side else destination

    def configure(self, settings: Route) -> None:
        """Put the live part of a changed configuration into force: policy and numeric parameters.

        Raises:
            AlgorithmError: a parameter that is out of range; nothing has changed then.
        """
        params = validate_params(self.definition, settings.params, settings.models)
        self.params = numeric_params(params)
        self.version += 1
        self.on_peer_loss = settings.on_peer_loss
        self.max_stall = settings.max_stall


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What routes need to know of this worker's model."""

    vocab_size: int
    hidden_size: int
    device: torch.device
    embedding: torch.Tensor | None = None
    """The model's embedding, which some algorithms look tokens up in; None for a script."""
    defer: torch.Tensor | None = None
    """The row that a model of Co-LLM has beside its vocabulary."""


def build_routes(
    config: Config, model: str, facts: ModelFacts, eos_ids: dict[str, frozenset[int]]
) -> dict[str, WorkerRoute]:
    """Every route that `model` takes part in, by public name.

    Args:
        config: the whole configuration.
        model: this worker's model.
        facts: what is known of it.
        eos_ids: end-of-answer ids of every model.

    Raises:
        AlgorithmError: an algorithm that cannot be loaded or parameters that it does not take.
    """
    routes = {}
    for name, route in config.all_routes().items():
        if model not in route.models:
            continue
        definition = load(route.algorithm)
        params = validate_params(definition, route.params, route.models)
        side = route.models.index(model)
        context = RouteContext(
            tuple(route.models), side, facts.vocab_size, facts.hidden_size, facts.device, facts.embedding, facts.defer
        )
        routes[name] = WorkerRoute(
            name=name,
            models=tuple(route.models),
            workers=tuple(config.worker_index(m) for m in route.models),
            side=side,
            eos_ids=frozenset().union(*(eos_ids[m] for m in route.models)),
            context=context,
            algorithm=build_side(definition, context, params),
            definition=definition,
            params=numeric_params(params),
            on_peer_loss=route.on_peer_loss,
            max_stall=route.max_stall,
        )
    return routes


def build_side(definition: Definition, context: RouteContext, params: msgspec.Struct) -> Algorithm:
    """The algorithm object of one side of a route.

    Raises:
        AlgorithmError: its own code failed.
    """
    try:
        return definition.sides(context.side)(context, params)
    except AlgorithmError as error:
        raise AlgorithmError(f"algorithm {definition.name!r}: {error}", error.key) from error
    except (Exception, SystemExit) as error:  # code of users
        reason = " ".join(str(error).split())
        raise AlgorithmError(
            f"algorithm {definition.name!r}: side {context.side} cannot be built: {type(error).__name__}: {reason}"
        ) from error
