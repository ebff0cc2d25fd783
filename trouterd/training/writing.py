"""Answers that a pair writes together, or one model alone: greedy decoding of many texts at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from models.batch import StepOutput
from trouterd.training.pair import Pair
from trouterd.training.reader import Bookmark, Reader

Asks = Callable[[StepOutput, torch.Tensor, torch.Tensor], torch.Tensor]
"""(output of R rows, [R] its greedy tokens, [R] their output indices) -> [R] bool: the large model writes (or goes on writing)."""


@dataclass(slots=True)
class Written:
    """One answer: its ids and, for each, whether the large model wrote it."""

    ids: list[int] = field(default_factory=list)
    by_large: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who writes which token."""

    small: Asks
    """Asked at the small model's tokens: True drops the token, and the large model writes its place."""
    large: Asks | None = None
    """Asked after the large model's tokens: True keeps it writing. None: it writes one token at a time."""


@dataclass(slots=True)
class _Text:
    number: int
    ids: list[int]
    end: int
    """Length at which the budget is spent."""
    small: Bookmark | None
    large: Bookmark | None = None
    with_large: bool = False


def write(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    limit: int,
    ends: frozenset[int],
    done: Callable[[Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """Greedy continuations by one model, end ids included.

    Args:
        reader: the model.
        prompts: ids to go on from.
        limit: most tokens of each.
        ends: ids after which a continuation ends.
        done: also ends one; gets the ids written so far.
    """
    written: list[list[int]] = [[] for _ in prompts]
    waiting = deque(range(len(prompts)))
    live: list[tuple[int, list[int], Bookmark]] = []
    while waiting or live:
        while waiting and len(live) < reader.texts:
            number = waiting.popleft()
            ids = list(prompts[number])
            live.append((number, ids, reader.open(ids, len(ids) + limit)))
        tokens = reader.feed([(mark, ids) for _, ids, mark in live]).logits.argmax(-1).tolist()
        going = []
        for (number, ids, mark), token in zip(live, tokens, strict=True):
            written[number].append(token)
            ids.append(token)
            if token in ends or len(written[number]) >= limit or (done is not None and done(written[number])):
                reader.close(mark)
            else:
                going.append((number, ids, mark))
        live = going
    return written


def write_routed(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    rule: Rule,
) -> list[Written]:
    """Greedy answers by both models, as the daemon's routes write them."""
    return _Desk(pair, prompts, rule).run()


class _Desk:
    """The texts of one `write_routed`."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], rule: Rule) -> None:
        self._pair = pair
        self._prompts = prompts
        self._rule = rule
        self._limit = pair.limit
        self._ends = pair.eos_ids
        self._written = [Written() for _ in prompts]
        self._live: list[_Text] = []

    def run(self) -> list[Written]:
        waiting = deque(range(len(self._prompts)))
        while waiting or self._live:
            while waiting and len(self._live) < self._pair.small.texts:
                self._live.append(self._open(waiting.popleft()))
            self._step()
        return self._written

    def _open(self, number: int) -> _Text:
        ids = list(self._prompts[number])
        end = len(ids) + self._limit
        return _Text(number, ids, end, self._pair.small.open(ids, end))

    def _step(self) -> None:
        """One token for every live text."""
        tokens: dict[int, int] = {}
        asked = [text for text in self._live if text.with_large]
        mine = [text for text in self._live if not text.with_large]
        if mine:
            output = self._pair.small.feed([(text.small, text.ids) for text in mine if text.small is not None])
            greedy = output.logits.argmax(-1)
            wants = self._rule.small(output, greedy, self._index(mine)).tolist()
            for text, token, want in zip(mine, greedy.tolist(), wants, strict=True):
                if want:
                    asked.append(text)
                else:
                    tokens[text.number] = token
        by_large = {text.number for text in asked}
        if asked:
            tokens |= self._ask_large(asked)
        for text in self._live:
            self._commit(text, tokens[text.number], text.number in by_large)
        self._live = [text for text in self._live if text.small is not None]

    def _ask_large(self, asked: Sequence[_Text]) -> dict[int, int]:
        for text in asked:
            if text.large is None:
                text.large = self._pair.large.open(text.ids, text.end)
        output = self._pair.large.feed([(text.large, text.ids) for text in asked if text.large is not None])
        greedy = output.logits.argmax(-1)
        stays = [False] * len(asked)
        if self._rule.large is not None:
            stays = self._rule.large(output, greedy, self._index(asked)).tolist()
        for text, stay in zip(asked, stays, strict=True):
            text.with_large = stay
        return {text.number: token for text, token in zip(asked, greedy.tolist(), strict=True)}

    def _index(self, texts: Sequence[_Text]) -> torch.Tensor:
        indices = [len(self._written[text.number].ids) for text in texts]
        return torch.tensor(indices, dtype=torch.int64, device=self._pair.small.device)

    def _commit(self, text: _Text, token: int, by_large: bool) -> None:
        written = self._written[text.number]
        written.ids.append(token)
        written.by_large.append(by_large)
        text.ids.append(token)
        if (token in self._ends or len(text.ids) >= text.end) and text.small is not None:
            self._pair.small.close(text.small)
            text.small = None
            if text.large is not None:
                self._pair.large.close(text.large)
