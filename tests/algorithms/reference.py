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
Score = Callable[[Sequence[int]], float]
"""Prompt + output ids -> what a trained head says of the entry's hidden state."""


@dataclass(frozen=True)
class Row:
    """What a rule sees of one decoding step; `model` is the route index of the model that decodes."""

    model: int
    logits: list[float]
    token: int
    index: int
    seed: int
    choice: int
    ids: Sequence[int]
    """Prompt + output ids."""
    banned: Sequence[int]


@dataclass(frozen=True)
class Decision:
    """Which model (route index) writes next: the same position, or the following one if the token is kept."""

    writer: int
    keep: bool
    combined: int | None = None
    """The token of this position, which the entry writes when the request is back there."""


Rule = Callable[[Row], Decision]


First = Callable[[Sequence[int], Sampling], int]
"""Which model (route index) writes the first token, decided before anything is computed."""


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
    first: First = lambda *_: 0,
) -> Trace:
    """Decode one request under a rule; models are in the route's order, the first one is the entry.

    `known` starts at output 0 for all: the peers get the prompt at admission. Tokens of a peer that keeps the request, or that
    hands over to another peer, reach the entry at once, for streaming.
    """
    trace = Trace()
    known = [0] * len(models)
    holder = first(prompt, sampling)
    stall = 0
    if holder:
        trace.handoffs.append(Handoff(0, 0, holder, 0, 0))
        stall = 1
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    while True:
        index = len(trace.tokens)
        logits = models[holder]([*prompt, *trace.tokens])
        ids, banned = [*prompt, *trace.tokens], sorted(ends) if index < sampling.min_tokens else []
        token = draw(logits, sampling, index, banned)
        decision = rule(Row(holder, logits.tolist(), token, index, sampling.seed, sampling.choice, ids, banned))
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
            source, holder = holder, writer
            stall += 1
            if decision.combined is not None:
                trace.tokens.append(decision.combined)
                trace.writers.append(source)
                stall, known[0] = 0, length + 1
                if decision.combined in ends or length + 1 == sampling.max_tokens:
                    trace.finish = "stop" if decision.combined in ends else "length"
                    return trace


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


def log_u(logits: Sequence[float]) -> tuple[float, float]:
    """Aleatoric and epistemic uncertainty of the ten largest logits."""
    evidence = torch.tensor(sorted(logits)[-10:], dtype=torch.float64).clamp(min=0.0)
    total = evidence.sum()
    terms = evidence / total * (torch.digamma(evidence + 1) - torch.digamma(total + 1))
    return (0.0 if total == 0 else -float(terms.sum())), 10 / (float(total) + 10)


def entropy(
    threshold: float,
    measure: str = "entropy",
    back: str = "one",
    threshold_back: float | None = None,
    epistemic: float = 0.0,
) -> Rule:
    """The entry hands an unsure position over; the peer writes one token, or on until it is sure."""

    def unsure(logits: list[float], limit: float) -> bool:
        if measure == "entropy":
            return nats(logits) >= limit
        if measure == "normalized_entropy":
            return nats(logits) / math.log(len(logits)) >= limit
        if measure == "aleatoric":
            return log_u(logits)[0] >= limit and log_u(logits)[1] >= single(epistemic)
        if measure == "epistemic":
            return log_u(logits)[1] >= limit
        first, second = sorted(probabilities(logits))[:-3:-1]
        return (first if measure == "confidence" else first - second) <= limit

    def rule(row: Row) -> Decision:
        if row.model == 0:
            return Decision(int(unsure(row.logits, single(threshold))), keep=False)
        limit = single(threshold if threshold_back is None else threshold_back)
        return Decision(int(back == "confident" and unsure(row.logits, limit)), keep=True)

    return rule


def rstitch(tau: float, vocab: int = 0, score: Score | None = None, threshold: float = 0.5) -> Rule:
    """The small model hands an unsure position over, unless a head trusts it; the large one writes on until it is sure, and keeps
    that token."""

    def rule(row: Row) -> Decision:
        unsure = nats(row.logits) / math.log(vocab or len(row.logits)) > single(tau)
        if row.model == 0 and score is not None:
            unsure = unsure and score(row.ids) < single(threshold)
        return Decision(int(unsure), keep=row.model == 1)

    return rule


def citer(score: Score, threshold: float) -> Rule:
    """The peer writes where the head's confidence is too small."""

    def rule(row: Row) -> Decision:
        return Decision(int(row.model == 0 and score(row.ids) < single(threshold)), keep=row.model == 1)

    return rule


def eta(threshold: float, index: int, schedule: str, warmup: int) -> float:
    """Co-LLM's threshold at an output index."""
    if schedule == "constant" or index >= warmup:
        return threshold
    if schedule == "linear":
        return 1 + (threshold - 1) * index / warmup
    if schedule == "cosine":
        return threshold + (1 - threshold) * (1 + math.cos(math.pi * index / warmup)) / 2
    return threshold ** (index / warmup)


def collm(
    score: Score, threshold: float, schedule: str = "constant", warmup: int = 15, entry: Logits | None = None
) -> Rule:
    """The peer is asked where the entry's deferral is large: for a token, or, with the `entry` model given, for its
    distribution, which is mixed with the entry's own."""

    def rule(row: Row) -> Decision:
        share = score(row.ids)
        if row.model == 0:
            return Decision(int(share > eta(threshold, row.index, schedule, warmup)), keep=False)
        if entry is None:
            return Decision(0, keep=True)
        pairs = zip(probabilities(entry(row.ids).tolist()), probabilities(row.logits), strict=True)
        mixed = [(1 - share) * mine + share * other for mine, other in pairs]
        allowed = (token for token in range(len(mixed)) if token not in row.banned)
        return Decision(0, keep=False, combined=max(allowed, key=mixed.__getitem__))

    return rule


def every_n(shape: str, n: int, models: int = 2, *, by_seed: bool = False) -> Rule:
    """Blocks of n tokens in turn, or one token of the peer at the end of every n."""

    def rule(row: Row) -> Decision:
        behind = row.index + 1 + (((row.seed + row.choice) % 2**31) % n if by_seed else 0)
        if shape == "block":
            return Decision(behind // n % models, keep=True)
        return Decision(int(row.model == 0 and behind % n == 0), keep=row.model == 1)

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


def first_drawn(weights: Sequence[float]) -> First:
    """Whoever is drawn for position 0."""
    return lambda _, sampling: drawn(sampling.seed, sampling.choice, 0, weights)


def stay() -> Rule:
    """Whoever has begun writes to the end."""
    return lambda row: Decision(row.model, keep=False)


def query_hidden(score: Score, threshold: float) -> Rule:
    """After the entry's prefill: the peer writes all where the head's confidence is too small."""

    def rule(row: Row) -> Decision:
        leaves = row.model == 0 and row.index == 0 and 1 - score(row.ids) >= single(threshold)
        return Decision(1 if leaves else row.model, keep=False)

    return rule


def first_of_query(source: str, threshold: float, score: float | None = None) -> First:
    """The large model where the score of the prompt reaches the threshold."""

    def first(prompt: Sequence[int], sampling: Sampling) -> int:
        values = {
            "field": score,
            "length": len(prompt),
            "random": uniform(sampling.seed, sampling.choice, 0, Purpose.ROUTE),
        }
        return int(values[source] >= threshold)

    return first
