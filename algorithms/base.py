"""The interface of a routing algorithm: `route`, `send`, `receive`, from the view of one side of one route.

Family of a side (`keep_sample`): in the *rewrite* family the decision is about the token just sampled, which is discarded and
written by the peer; in the *keep* family that token stays and the decision is who writes the next one.
Source of the three-function shape: TokenRouter, arXiv 2610.12242.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

MOST_MODELS = 256
"""Models of one route: the writer of a token travels as one byte."""


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of an algorithm that has none."""


@dataclass(frozen=True, slots=True)
class RouteContext:
    """What a side knows of its route, once, when it is built."""

    models: tuple[str, ...]
    """Names in the route's order; index 0 is the entry."""
    side: int
    """Index of this worker's model in `models`."""
    vocab_size: int
    hidden_size: int
    device: torch.device
    embedding: torch.Tensor | None = None
    """[rows >= vocab_size, E] of this worker's model, on `device`; None where there are no weights (a script)."""
    defer: torch.Tensor | None = None
    """[H] float32, on `device`: the LM head row of the model's <|defer|> token, which is no part of its vocabulary here; None for a
    model without one."""

    def destination(self, model: int) -> int:
        """Destination number of route index `model` as seen from this side: 0 = stay, k = the k-th other model."""
        if model == self.side:
            return 0
        return model + 1 if model < self.side else model


@dataclass(slots=True)
class StepResult:
    """The R rows of one forward pass that belong to one route, all on this side. Nothing in it may be modified."""

    logits: torch.Tensor
    """[R, V] float32, raw: before temperature and masks."""
    hidden: torch.Tensor
    """[R, H] the LM head's input."""
    tokens: torch.Tensor
    """[R] int64: the sampled tokens."""
    index: torch.Tensor
    """[R] int64: output index of the sampled token."""
    seed: torch.Tensor
    """[R] int64: the request seed's bits."""
    choice: torch.Tensor
    """[R] int64."""
    params: dict[str, torch.Tensor]
    """Each numeric parameter of the algorithm as a per-row float32 tensor [R] (per-request overrides are already in it)."""
    state: list[dict[str, Any]]
    """[R] per-request scratch space of this side, kept from step to step; empty at first. `send`, `receive` and `combine` see it
    too. Not for `pure` algorithms."""


@dataclass(slots=True)
class TokenView:
    """One row of a step for `Algorithm.decide`: plain Python, for rules that fit in a line."""

    logits: torch.Tensor
    """[V] float32, raw."""
    hidden: torch.Tensor
    """[H]"""
    token: int
    index: int
    seed: int
    choice: int
    params: dict[str, float]
    state: dict[str, Any]

    @property
    def probabilities(self) -> torch.Tensor:
        """[V] softmax of the raw logits."""
        return torch.softmax(self.logits, dim=-1)

    @property
    def confidence(self) -> float:
        """Largest probability of the raw distribution."""
        return float(self.probabilities.max())

    @property
    def entropy(self) -> float:
        """Entropy of the raw distribution in nats."""
        return float(torch.special.entr(self.probabilities).sum())


@dataclass(slots=True)
class PromptView:
    """A request before its prefill, as `start` sees it."""

    tokens: Sequence[int]
    """Prompt ids."""
    seed: int
    choice: int
    params: dict[str, float]
    """Each numeric parameter, per-request overrides included."""
    score: float | None
    """What the api says of the whole prompt, for algorithms that decide by it."""


@dataclass(slots=True)
class OutputView:
    """A request as `send` and `receive` see it."""

    tokens: Sequence[int]
    """Prompt and committed output ids (the keep family's sample included)."""
    prompt_length: int
    known: Sequence[int]
    """Per model of the route: output tokens it knows (-1: not even the prompt)."""
    state: dict[str, Any]
    banned: Collection[int] = ()
    """Ids that may not be written next (those that end an answer, before its min_tokens)."""

    @property
    def output_length(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> Sequence[int]:
        """Committed output ids (a copy)."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class Handoff:
    """What `send` decides: the output ids from `start` on, and the first index that the peer may write."""

    start: int
    loc: int
    payload: bytes = b""


class Algorithm:
    """One side of a routing algorithm. Subclasses give `route` or `decide`, and `keep_sample`.

    A file in `algorithms/` (or a user's, by entry point group `trouterd.algorithms` or by path in the config) exposes one
    `Definition`. Randomness must be keyed by (seed, choice, index): see `models.rng`.
    """

    keep_sample: bool = False
    """True: the sampled token is kept and travels in the suffix. False: it is dropped and the peer writes its position.
    A class attribute, or set in `__init__` where it depends on the parameters: read it from the instance."""
    pure: bool = True
    """`route` may run on the device, captured in a graph and behind a step whose results nobody has seen yet: it is tensor code
    of fixed shapes that never looks at values on the host (no item(), tolist(), bool() of a tensor), it neither reads nor
    writes `StepResult.state`, and it keeps no state of its own. Overriding `decide` clears it; a class whose `route` keeps
    state of its own has to clear it itself, on the class or in `__init__`. The other breaches are found when a worker starts; such
    algorithms are decided by the host, which costs the steps that they are in their place in the queue."""

    warms_peers: bool = True
    """The entry's: the peers get the prompt as soon as the request is admitted, and prefill it while the entry writes. False where
    most requests never get there."""

    def __init__(self, context: RouteContext, params: msgspec.Struct) -> None:
        self.context = context
        self.params = params

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "decide" in cls.__dict__:
            cls.pure = False

    def start(self, prompt: PromptView) -> int:
        """Destination of a request that the entry has just admitted: who writes its first token. Default: the entry.

        Asked once, at the entry alone. Another model gets the request with its prompt, and the entry computes nothing yet.
        """
        del prompt
        return 0

    def route(self, step: StepResult) -> torch.Tensor:
        """[R] int64 destination per row: 0 = stay here, k = the k-th other model of the route, from 1."""
        names = list(step.params)
        columns = [step.params[name].tolist() for name in names]
        tokens, index = step.tokens.tolist(), step.index.tolist()
        seed, choice = step.seed.tolist(), step.choice.tolist()
        rows = (
            TokenView(
                step.logits[r],
                step.hidden[r],
                tokens[r],
                index[r],
                seed[r],
                choice[r],
                {name: column[r] for name, column in zip(names, columns, strict=True)},
                step.state[r],
            )
            for r in range(len(tokens))
        )
        return torch.tensor([self.decide(row) for row in rows], dtype=torch.int64)

    def decide(self, token: TokenView) -> int:
        """The same as `route` for one request, in plain Python; slower, batched by `route`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither route() nor decide()")

    def send(self, request: OutputView, model: int) -> Handoff:
        """Which suffix goes to route index `model`; default: what it has not seen."""
        return Handoff(start=max(request.known[model], 0), loc=request.output_length)

    def receive(self, request: OutputView, tokens: Sequence[int], payload: bytes) -> int:
        """How many of the returned tokens to accept; default: all."""
        del request, payload
        return len(tokens)

    def combine(self, request: OutputView, payload: bytes) -> int | None:
        """Entry: a token for the next position, written without a step of the model; default: None, the next step gives it.

        Args:
            request: with the tokens of the hand-off that has just come back, and what `route` has left in its state.
            payload: of that hand-off; this is not called without one.
        """
        del request, payload
        return None


class ReturnAfterOne(Algorithm):
    """The peer's side of every algorithm that asks for one token: keep it, go back to the entry."""

    keep_sample = True

    def route(self, step: StepResult) -> torch.Tensor:
        """Always back to the entry."""
        return torch.full_like(step.tokens, self.context.destination(0))


@dataclass(frozen=True, slots=True)
class Definition:
    """What an algorithm file exposes: a name, the class of each side, its parameters and how many models it takes."""

    name: str
    sides: Callable[[int], type[Algorithm]]
    """Route index -> class: 0 is the entry, so that the small and the large side may differ (R-Stitch)."""
    params: type[msgspec.Struct] = NoParams
    """Frozen struct with `forbid_unknown_fields`; ranges by `msgspec.Meta`; every numeric field, and every `tuple[float, ...]`, may
    be set live and per request. Entry i of such a tuple `name` is the parameter `name.i` of a row."""
    min_models: int = 2
    max_models: int = 2
    check: Callable[[Any, tuple[str, ...]], None] | None = None
    """What ranges cannot say, for example one weight per model: gets the parameters and the route's models, raises ValueError
    with a message that starts with the parameter's name."""
