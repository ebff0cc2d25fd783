"""The oracle for algorithms with drafts: rounds of provisional tokens as plain loops, a full forward pass for every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ipc.messages import Sampling
from tests.algorithms.reference import Handoff, Logits, Trace, draw, probabilities, single

Takes = Callable[[list[float], list[float], int, int], bool]
"""(small's logits, large's logits, draft, the large model's own token) -> the draft is accepted."""
Passes = Callable[[list[float]], bool]
"""Log-probabilities of tokens under the small model -> they stay."""


@dataclass
class DraftTrace(Trace):
    """Also what was provisional, and how often the large model was asked."""

    drafted: int = 0
    accepted: int = 0
    visits: int = 0


class Writer:
    """An answer that grows: what all the loops below have in common."""

    def __init__(
        self, models: Sequence[Logits], prompt: Sequence[int], sampling: Sampling, eos: Collection[int]
    ) -> None:
        self.models = models
        self.prompt = prompt
        self.sampling = sampling
        self.ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
        self.trace = DraftTrace()
        self.known = [0, 0]

    @property
    def tokens(self) -> list[int]:
        return self.trace.tokens

    def logits(self, model: int, drafts: Sequence[int] = ()) -> list[float]:
        values: list[float] = self.models[model]([*self.prompt, *self.tokens, *drafts]).tolist()
        return values

    def draw(self, model: int, drafts: Sequence[int] = ()) -> int:
        """What a model writes behind the output and some drafts."""
        index = len(self.tokens) + len(drafts)
        banned = sorted(self.ends) if index < self.sampling.min_tokens else []
        return draw(self.models[model]([*self.prompt, *self.tokens, *drafts]), self.sampling, index, banned)

    def ended(self, token: int, length: int) -> bool:
        """A token that is the last one of an output of this length would end it."""
        return token in self.ends or length == self.sampling.max_tokens

    def commit(self, token: int, writer: int) -> bool:
        """Whether this ends the answer."""
        self.trace.tokens.append(token)
        self.trace.writers.append(writer)
        if self.ended(token, len(self.tokens)):
            self.trace.finish = "stop" if token in self.ends else "length"
        return bool(self.trace.finish)

    def hand_over(self, destination: int, suffix: int, loc: int) -> None:
        self.trace.handoffs.append(Handoff(loc, 1 - destination, destination, suffix, loc))


def rounds(
    models: Sequence[Logits],
    takes: Takes,
    prompt: Sequence[int],
    sampling: Sampling,
    eos: Collection[int] = (),
    gamma: int = 4,
) -> DraftTrace:
    """Up to gamma drafts by the small model, then those that are taken and one token by the large model, and so on."""
    writer = Writer(models, prompt, sampling, eos)
    trace = writer.trace
    while not trace.finish:
        loc = len(writer.tokens)
        drafts: list[int] = []
        while len(drafts) < gamma and loc + len(drafts) + 1 < max(sampling.max_tokens, loc + 2):
            drafts.append(writer.draw(0, drafts))
            if drafts[-1] in writer.ends:
                break
        trace.drafted += len(drafts)
        trace.visits += 1
        writer.hand_over(1, loc - writer.known[1] + len(drafts), loc)
        _verify(writer, drafts, takes)
        writer.known[1] = len(writer.tokens)
        if not trace.finish:
            writer.hand_over(0, len(writer.tokens) - loc, len(writer.tokens))
    return trace


def _verify(writer: Writer, drafts: list[int], takes: Takes) -> None:
    for draft in drafts:
        own = writer.draw(1)
        if not takes(writer.logits(0), writer.logits(1), draft, own):
            writer.commit(own, 1)
            return
        writer.trace.accepted += 1
        if writer.commit(draft, 0):
            return
    writer.commit(writer.draw(1), 1)


def speculative() -> Takes:
    """What the large model writes itself."""
    return lambda q, p, draft, own: draft == own


def speculative_cascade(rule: str, alpha: float) -> Takes:
    """The same where the rule defers, everything elsewhere."""

    def takes(q: list[float], p: list[float], draft: int, own: int) -> bool:
        sure = 1.0 if rule == "chow" else max(probabilities(p))
        deferred = max(probabilities(q)) < sure - single(alpha)
        return draft == own or not deferred

    return takes


def cascade(
    models: Sequence[Logits],
    passes: Passes,
    prompt: Sequence[int],
    sampling: Sampling,
    eos: Collection[int] = (),
    chunk: int = 0,
) -> DraftTrace:
    """The small model writes the answer, or (chunk > 0) chunks up to multiples of so many tokens; the large one those that fail."""
    writer = Writer(models, prompt, sampling, eos)
    trace = writer.trace
    while not trace.finish:
        loc = len(writer.tokens)
        drafts: list[int] = []
        scores: list[float] = []
        while not drafts or not (
            writer.ended(drafts[-1], loc + len(drafts)) or (chunk and (loc + len(drafts)) % chunk == 0)
        ):
            token = writer.draw(0, drafts)
            scores.append(math.log(max(probabilities(writer.logits(0, drafts))[token], 1e-300)))
            drafts.append(token)
        trace.drafted += len(drafts)
        if passes(scores):
            trace.accepted += len(drafts)
            for token in drafts:
                writer.commit(token, 0)
            continue
        trace.visits += 1
        writer.hand_over(1, loc - writer.known[1], loc)
        while not writer.commit(writer.draw(1), 1) and not (chunk and len(writer.tokens) % chunk == 0):
            pass
        writer.known[1] = len(writer.tokens)
        if not trace.finish:
            # The others have been streamed.
            writer.hand_over(0, 1, len(writer.tokens))
    return trace


def mean(threshold: float) -> Passes:
    """The mean is at least the threshold."""
    return lambda scores: math.fsum(scores) / len(scores) >= threshold


def quantile(threshold: float, at: float) -> Passes:
    """A quantile is."""
    return lambda scores: sorted(scores)[int(at * (len(scores) - 1))] >= threshold
