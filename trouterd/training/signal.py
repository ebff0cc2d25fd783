"""The number that a threshold is compared with, and the texts along which it is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from models.batch import StepOutput
from trouterd.training.pair import Pair
from trouterd.training.writing import Rule, Written

Values = Callable[[StepOutput, torch.Tensor], torch.Tensor]
"""(output of R rows, [R] its greedy tokens) -> [R] float32."""


@dataclass(frozen=True, slots=True)
class Signal:
    """What an algorithm looks at, in the unit of its threshold."""

    small: Values
    """At the small model's tokens."""
    large: Values | None = None
    """At the large model's own, for algorithms that stay with it until it is sure."""
    rises: bool = True
    """The large model is asked at and above the threshold; False: below it."""
    once: bool = False
    """Only the first value of a text counts: it decides about the whole answer."""

    def asks(self, values: torch.Tensor, threshold: float) -> torch.Tensor:
        """[R] bool: the large model is asked. Thresholds lie between values, so that equality does not matter."""
        return values >= threshold if self.rises else values < threshold

    def rule(self, threshold: float) -> Rule:
        """The rule of writing that the threshold makes."""

        def small(output: StepOutput, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            asked = self.asks(self.small(output, tokens), threshold)
            return asked & (index == 0) if self.once else asked

        def stays(output: StepOutput, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            del index
            return torch.ones_like(tokens) if self.large is None else self.asks(self.large(output, tokens), threshold)

        return Rule(small, stays if self.once or self.large is not None else None)


@dataclass(frozen=True, slots=True)
class Series:
    """A signal along one answer."""

    small: torch.Tensor
    """[T] at each of its tokens."""
    large: torch.Tensor | None


def measure(
    pair: Pair, signal: Signal, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Series]:
    """The signal along given answers, each model reading all of them."""
    texts = [([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    small = [rows[0] for rows in pair.small.read(texts, _digest(signal.small))]
    if signal.large is None:
        return [Series(values, None) for values in small]
    large = pair.large.read(texts, _digest(signal.large))
    return [Series(values, rows[0]) for values, rows in zip(small, large, strict=True)]


def large_tokens(signal: Signal, series: Series, threshold: float) -> int:
    """Tokens of an answer that the large model writes at a threshold, if the text were the same."""
    asked = signal.asks(series.small, threshold)
    if signal.once:
        return len(asked) if bool(asked[:1].any()) else 0
    if series.large is None:
        return int(asked.sum())
    count, with_large = 0, False
    for ask, stay in zip(asked.tolist(), signal.asks(series.large, threshold).tolist(), strict=True):
        writes = with_large or ask
        count += writes
        with_large = writes and stay
    return count


def share(signal: Signal, series: Sequence[Series], threshold: float) -> float:
    """The large model's share of the tokens of all answers, in 0..1."""
    total = sum(len(one.small) for one in series)
    return sum(large_tokens(signal, one, threshold) for one in series) / max(1, total)


def written_share(answers: Sequence[Written]) -> float:
    """The large model's share of the tokens of written answers, in 0..1."""
    return sum(sum(answer.by_large) for answer in answers) / max(1, sum(len(answer.ids) for answer in answers))


def _digest(values: Values) -> Callable[[StepOutput, torch.Tensor], tuple[torch.Tensor, ...]]:
    return lambda output, _: (values(output, output.logits.argmax(-1)),)
