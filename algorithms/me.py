"""An ensemble by mixture: every token is written by one model, chosen by weight.

Rule, with t the output index and M >= 2 models of weights w_i (scaled to sum 1): token t is written by model z_t, the first token
included. Every token stays (keep family), models hand directly to each other.
- mode "draw": z_t ~ Categorical(w), drawn by (seed, choice, t). Given the tokens in front of it, token t then follows the mixture
  sum_i w_i p_i of the models' sampling distributions, at one forward pass a token. Shares are w_i, a token is followed by a
  change of writer with probability 1 - sum_i w_i^2, runs are geometric with mean 1 / (1 - w_i).
- mode "proportions": a fixed sequence without variance, a function of t alone: of the first t tokens the first model has
  floor(t w_0 + 1/2), and the rest is divided among the others in the same way. Every count stays within (M - 1) / 2 of
  t w_i.

Neither depends on batch mates, on the schedule, or on the model that works the choice out.
Source: the mixture view of ensembles, arXiv 2605.00419, as evaluated in arXiv 2610.12242.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta

from algorithms.base import MOST_MODELS, Algorithm, Definition, PromptView, RouteContext, StepResult
from models.rng import Purpose, uniform, uniform_tensor

_Number = TypeVar("_Number", float, torch.Tensor)
"""One request's value, or [R] float64: float arithmetic of both agrees bit for bit, wherever it runs."""


class MEParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `me`."""

    weights: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1e6)], ...],
        Meta(description="One number per model of the route, in its order; only their ratios count."),
    ]
    mode: Annotated[
        Literal["draw", "proportions"],
        Meta(description="A random writer per token, or a fixed sequence of the same shares."),
    ] = "draw"


class MixtureMember(Algorithm):
    """Every model of the route."""

    keep_sample = True

    def __init__(self, context: RouteContext, params: MEParams) -> None:
        super().__init__(context, params)
        self._draws = params.mode == "draw"
        self._names = [f"weights.{model}" for model in range(len(context.models))]

    def start(self, prompt: PromptView) -> int:
        """Who writes the first token."""
        # In the precision of per-row parameters, in which all later writers are found.
        weights = [float(np.float32(prompt.params[name])) for name in self._names]
        if self._draws:
            writer = _drawn(uniform(prompt.seed, prompt.choice, 0, Purpose.ROUTE), weights)
        else:
            writer = _in_proportion(0.0, weights)
        return self.context.destination(int(writer))

    def route(self, step: StepResult) -> torch.Tensor:
        """Who writes the token after each row's."""
        weights = [step.params[name].double() for name in self._names]
        after = step.index + 1
        if self._draws:
            writer = _drawn(uniform_tensor(step.seed, step.choice, after, Purpose.ROUTE), weights)
        else:
            writer = _in_proportion(after.double(), weights)
        writer = writer.long()
        own = self.context.side
        return (writer + (writer < own)).masked_fill(writer == own, 0)


def _drawn(point: _Number, weights: Sequence[_Number]) -> _Number:
    """The model in whose part of [0, 1) the point lies."""
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    point = point * total
    writer, edge = point * 0, point * 0
    for weight in weights[:-1]:
        edge = edge + weight
        writer = writer + (point >= edge)
    return writer


def _in_proportion(turn: _Number, weights: Sequence[_Number]) -> _Number:
    """The writer of the token `turn` of a fixed sequence."""
    parts: list[_Number] = []
    """Of what the models before leave; none above 1, since the sums behind grow from the end."""
    rest = turn * 0
    for weight in reversed(weights):
        rest = rest + weight
        parts.append(weight / (rest + (rest == 0)))
    writer, undecided = turn * 0, turn * 0 + 1
    for part in parts[:0:-1]:
        before = (turn * part + 0.5) // 1
        mine = (turn * part + part + 0.5) // 1 - before
        undecided = undecided * (1 - mine)
        writer = writer + undecided
        turn = turn - before
    return writer


def _check(params: MEParams, models: tuple[str, ...]) -> None:
    if len(params.weights) != len(models):
        raise ValueError(f"weights: {len(params.weights)} given for {len(models)} models")
    # In the precision in which writers are found.
    if not np.asarray(params.weights, dtype=np.float32).any():
        raise ValueError("weights: at least one must be above 0, and not by less than float32 can tell")


ALGORITHM = Definition("me", lambda _: MixtureMember, MEParams, max_models=MOST_MODELS, check=_check)
