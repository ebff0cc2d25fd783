"""One model of a pair, in this process: it reads texts and says what it would write next, many texts at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.batch import Batch, ModelRunner, StepOutput
from models.kv_cache import KvCache

MOST_ROWS = 1024
"""Token rows of one step."""

Rows = tuple[torch.Tensor, ...]
Digest = Callable[[StepOutput, torch.Tensor], Rows]
"""(output of R places, [R] ids that stand there) -> tensors of R rows each."""


@dataclass(slots=True)
class Bookmark:
    """How far the model has read a text."""

    slot: int
    fed: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Ids `start` to `end` of a text."""

    mark: Bookmark
    ids: Sequence[int]
    start: int
    end: int


class Reader:
    """A runner and its KV.

    Args:
        runner: the model.
        texts: texts that are open at once.
        context: longest text, tokens; the runner's pool must hold `texts` of them.
        eos_ids: with which the model ends an answer.
        defer: [H] the row that a model of Co-LLM has beside its vocabulary.
    """

    def __init__(
        self,
        runner: ModelRunner,
        texts: int,
        context: int,
        eos_ids: frozenset[int],
        defer: torch.Tensor | None = None,
    ) -> None:
        self.runner = runner
        self.texts = texts
        self.context = context
        self.eos_ids = eos_ids
        self.device = torch.device("cpu") if runner.embedding is None else runner.embedding.device
        self.defer = None if defer is None else defer.to(self.device)
        self._kv = KvCache(runner.num_pages, runner.page_size, texts, context, prefix_cache=True)

    def open(self, ids: Sequence[int], length: int) -> Bookmark:
        """Begin a text that may grow to `length` tokens; what is cached of it counts as read."""
        mark = self._open()
        if len(ids) > 1:
            mark.fed = self._kv.match(mark.slot, ids)
        self._reserve(mark, length)
        return mark

    def close(self, mark: Bookmark) -> None:
        """Give the text's room back; full pages stay cached."""
        self._kv.close(mark.slot)

    def feed(self, texts: Sequence[tuple[Bookmark, Sequence[int]]]) -> StepOutput:
        """Read every text to its end. Each must have an unread token.

        Returns:
            [R] what follows each text's last token.
        """
        outputs = []
        for step in _steps([(mark, ids, mark.fed, len(ids)) for mark, ids in texts]):
            ends = np.cumsum([span.end - span.start for span in step]) - 1
            outputs.append(self._run(step, ends[[span.end == len(span.ids) for span in step]]))
        for mark, ids in texts:
            self._kv.commit(mark.slot, ids, mark.fed)
        return StepOutput(
            torch.cat([output.logits for output in outputs]), torch.cat([output.hidden for output in outputs])
        )

    def read(self, texts: Sequence[tuple[Sequence[int], int]], digest: Digest) -> list[Rows]:
        """Read whole texts and keep what `digest` makes of each place.

        Args:
            texts: (ids, first): the places from `first` (>= 1) on count. The last id is predicted, not fed.
            digest: row by row; sees the output of places of several texts at once.

        Returns:
            One entry per text: the digest's tensors over its places, on the CPU.
        """
        return [
            rows
            for start in range(0, len(texts), self.texts)
            for rows in self._read(texts[start:][: self.texts], digest)
        ]

    def _read(self, texts: Sequence[tuple[Sequence[int], int]], digest: Digest) -> list[Rows]:
        marks = [self._open() for _ in texts]
        numbers = {mark.slot: number for number, mark in enumerate(marks)}
        parts: list[list[Rows]] = [[] for _ in texts]
        for mark, (ids, _) in zip(marks, texts, strict=True):
            self._reserve(mark, len(ids))
        for step in _steps([(mark, ids, 0, len(ids) - 1) for mark, (ids, _) in zip(marks, texts, strict=True)]):
            owners, rows, following, row = [], [], [], 0
            for span in step:
                number = numbers[span.mark.slot]
                wanted = range(max(span.start, texts[number][1] - 1), span.end)
                owners.append((number, len(wanted)))
                rows += [row + place - span.start for place in wanted]
                following += [span.ids[place + 1] for place in wanted]
                row += span.end - span.start
            digested = digest(self._run(step, np.asarray(rows, np.int64)), torch.tensor(following, dtype=torch.int64))
            counts = [count for _, count in owners]
            for (number, _), *piece in zip(
                owners, *(torch.split(part.cpu(), counts) for part in digested), strict=True
            ):
                parts[number].append(tuple(piece))
        for mark in marks:
            self.close(mark)
        return [tuple(torch.cat(column) for column in zip(*pieces, strict=True)) for pieces in parts]

    def _open(self) -> Bookmark:
        slot = self._kv.open()
        if slot is None:
            raise RuntimeError(f"{self.texts} texts are open already")
        return Bookmark(slot, 0)

    def _reserve(self, mark: Bookmark, length: int) -> None:
        if not self._kv.reserve(mark.slot, min(length, self.context)):
            raise RuntimeError("the KV pool is smaller than the texts that it was made for")

    def _run(self, step: Sequence[_Span], rows: np.ndarray) -> StepOutput:
        batch = Batch(
            tokens=np.concatenate([np.asarray(span.ids[span.start : span.end], np.int64) for span in step]),
            positions=np.concatenate([np.arange(span.start, span.end) for span in step]),
            slots=np.concatenate([np.full(span.end - span.start, span.mark.slot) for span in step]),
            page_table=self._kv.page_table,
            logit_rows=rows,
            output_index=np.zeros(len(rows), np.int64),
        )
        for span in step:
            span.mark.fed = span.end
        return self.runner.step(batch)


def _steps(texts: Sequence[tuple[Bookmark, Sequence[int], int, int]]) -> Iterator[list[_Span]]:
    """Spans of texts (mark, ids, start, end), packed in order into steps of at most MOST_ROWS rows."""
    step: list[_Span] = []
    room = MOST_ROWS
    for mark, ids, start, end in texts:
        while start < end:
            cut = min(end, start + room)
            step.append(_Span(mark, ids, start, cut))
            room -= cut - start
            start = cut
            if not room:
                yield step
                step, room = [], MOST_ROWS
    if step:
        yield step
