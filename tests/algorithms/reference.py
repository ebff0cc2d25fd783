"""The oracle: routed decoding as one plain loop, with a full forward pass over all ids for every token.

It shares no code with workers, runners or `algorithms/`: every rule is written again, in plain Python and double precision.
Only the position-keyed randomness (`models.rng`, `models.sampler`) is common, since it defines the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ipc.messages import Sampling
from models.rng import Purpose, uniform
from models.sampler import Edits, SamplingRows, sample

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Prompt + output ids -> [V] raw float32 logits of the next token."""


@dataclass(frozen=True)
class Row:
    """What a rule sees of one decoding step; `model` is the route index of the model that decodes."""

    model: int
    logits: list[float]
    token: int
    index: int
    seed: int
    choice: int


@dataclass(frozen=True)
class Decision:
    """Which model (route index) writes next: the same position, or the following one if the token is kept."""

    writer: int
    keep: bool


Rule = Callable[[Row], Decision]


@dataclass(frozen=True)
class Handoff:
    """A hand-off, decided on the token at output `index`: `suffix` ids travel, the destination writes from `loc` on."""

    index: int
    source: int
    destination: int
    suffix: int
    loc: int


@dataclass
class Trace:
    """An answer and how it came about; the token that ended it (EOS, stop id) is part of `tokens`."""

    tokens: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    handoffs: list[Handoff] = field(default_factory=list)
    finish: str = ""


def generate(
    models: Sequence[Logits],
    rule: Rule,
    prompt: Sequence[int],
    sampling: Sampling,
    eos: Collection[int] = (),
    max_stall: int = 8,
    first: int = 0,
) -> Trace:
    """Decode one request under a rule; models are in the route's order, the first one is the entry, `first` begins.

    `known` starts at output 0 for all: the peers get the prompt at admission. Tokens of a peer that keeps the request, or that
    hands over to another peer, reach the entry at once, for streaming.
    """
    trace = Trace()
    known = [0] * len(models)
    holder = stall = 0
    if first:
        trace.handoffs.append(Handoff(0, 0, first, 0, 0))
        holder, stall = first, 1
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    while True:
        index = len(trace.tokens)
        logits = models[holder]([*prompt, *trace.tokens])
        token = draw(logits, sampling, index, sorted(ends) if index < sampling.min_tokens else [])
        decision = rule(Row(holder, logits.tolist(), token, index, sampling.seed, sampling.choice))
        writer = decision.writer
        if decision.keep or writer == holder or stall >= max_stall:
            trace.tokens.append(token)
            trace.writers.append(holder)
            stall = 0
            if token in ends or len(trace.tokens) == sampling.max_tokens:
                trace.finish = "stop" if token in ends else "length"
                return trace
            known[holder] = len(trace.tokens)
            writer = writer if decision.keep else holder
            if writer != 0:
                known[0] = len(trace.tokens)
        if writer != holder:
            length = len(trace.tokens)
            trace.handoffs.append(Handoff(index, holder, writer, length - known[writer], length))
            known[writer] = length
            holder = writer
            stall += 1


def draw(logits: torch.Tensor, sampling: Sampling, index: int, banned: Sequence[int]) -> int:
    """The token of one position; banned ids cannot be drawn."""
    if sampling.temperature == 0:
        return int(logits.index_fill(0, torch.tensor(banned, dtype=torch.int64), -math.inf).argmax())
    zeros = np.zeros(len(banned), np.int64)
    bias = Edits(zeros, np.array(banned, np.int64), np.full(len(banned), -math.inf, np.float32))
    rows = SamplingRows(
        temperature=np.array([sampling.temperature], np.float32),
        top_k=np.array([sampling.top_k]),
        top_p=np.array([sampling.top_p], np.float32),
        min_p=np.array([sampling.min_p], np.float32),
        seed=np.array([sampling.seed], np.uint64),
        choice=np.array([sampling.choice]),
        output_index=np.array([index]),
        bias=bias,
    )
    return int(sample(logits[None], rows))


def single(threshold: float) -> float:
    """A parameter as the float32 that workers compare with."""
    return float(np.float32(threshold))


def probabilities(logits: Sequence[float]) -> list[float]:
    """Softmax in double precision."""
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def nats(logits: Sequence[float]) -> float:
    """Entropy of the softmax."""
    return -math.fsum(p * math.log(p) for p in probabilities(logits) if p > 0)


def none() -> Rule:
    """The entry writes everything."""
    return lambda row: Decision(row.model, keep=False)


def entropy(threshold: float, measure: str = "entropy", back: str = "one") -> Rule:
    """The entry hands an unsure position over; the peer writes one token, or on until it is sure."""
    limit = single(threshold)

    def unsure(logits: list[float]) -> bool:
        if measure == "entropy":
            return nats(logits) >= limit
        if measure == "normalized_entropy":
            return nats(logits) / math.log(len(logits)) >= limit
        first, second = sorted(probabilities(logits))[:-3:-1]
        return (first if measure == "confidence" else first - second) <= limit

    def rule(row: Row) -> Decision:
        if row.model == 0:
            return Decision(int(unsure(row.logits)), keep=False)
        return Decision(int(back == "confident" and unsure(row.logits)), keep=True)

    return rule


def rstitch(tau: float, vocab: int = 0) -> Rule:
    """The small model hands an unsure position over; the large one writes on until it is sure, and keeps that token."""

    def rule(row: Row) -> Decision:
        unsure = nats(row.logits) / math.log(vocab or len(row.logits)) > single(tau)
        return Decision(int(unsure), keep=row.model == 1)

    return rule


def every_n(shape: str, n: int, models: int = 2) -> Rule:
    """Blocks of n tokens in turn, or one token of the peer at the end of every n."""

    def rule(row: Row) -> Decision:
        if shape == "block":
            return Decision((row.index + 1) // n % models, keep=True)
        return Decision(int(row.model == 0 and (row.index + 1) % n == 0), keep=row.model == 1)

    return rule


def bernoulli(p: float) -> Rule:
    """Each position goes to the peer with probability p, drawn by position."""

    def rule(row: Row) -> Decision:
        away = row.model == 0 and uniform(row.seed, row.choice, row.index, Purpose.ROUTE) < single(p)
        return Decision(int(away), keep=row.model == 1)

    return rule


def drawn(seed: int, choice: int, index: int, weights: Sequence[float]) -> int:
    """The model that an ensemble draws for a position."""
    parts = [single(weight) for weight in weights]
    point = uniform(seed, choice, index, Purpose.ROUTE) * math.fsum(parts)
    return next(model for model in range(len(parts)) if point < math.fsum(parts[: model + 1]))


def proportioned(index: int, weights: Sequence[float]) -> int:
    """The model whose turn it is: the first has its rounded share, the others divide the rest as if it were not there."""
    parts = [single(weight) for weight in weights]
    for model, part in enumerate(parts[:-1]):
        whole = math.fsum(parts[model:])
        shares = [math.floor(turn * part / whole + 0.5) if whole else 0 for turn in (index, index + 1)]
        if shares[1] > shares[0]:
            return model
        index -= shares[0]
    return len(parts) - 1


def me(weights: Sequence[float], mode: str = "draw") -> Rule:
    """Whoever is drawn, or whose turn it is, for the next position."""

    def rule(row: Row) -> Decision:
        if mode == "draw":
            return Decision(drawn(row.seed, row.choice, row.index + 1, weights), keep=True)
        return Decision(proportioned(row.index + 1, weights), keep=True)

    return rule


def query_after_prefill(strong: Callable[[Row], bool]) -> Rule:
    """The first position decides who writes all of them; the sample of it is dropped with the rest of the small model's part."""
    return lambda row: Decision(int(row.model == 1 or (row.index == 0 and strong(row))), keep=row.model == 1)
