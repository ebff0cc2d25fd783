"""A trial of a model over paged attention: does it write what the model writes with attention of its own?

It finds what no list of known features can: attention with terms that ours lacks, states that pass from token to token
elsewhere than through K and V, rows that are told apart by something else than their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from models.batch import Batch, IntArray

_LENGTHS = (40, 25)
"""Tokens of the random requests."""
_STEPS = ((5, 0), (1, 7), (9, 1), (25, 17))
"""How many of them each step feeds: long and short runs, alone and mixed."""
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest relative difference of a row's logits. bfloat16 keeps 8 bits, every layer rounds, and a rounding may send a row
to another expert: there the median row counts. Wrong attention differs by more, and in most rows."""

Whole = Callable[[IntArray], torch.Tensor]
"""Ids of one request -> logits [T, V] of all its rows, by the model's own attention."""
Paged = Callable[[Batch], torch.Tensor]
"""A batch that wants the logits of all its rows -> [T, V]."""


class UnservedError(Exception):
    """The model needs something that paged attention does not give; the message says what."""


class Trial:
    """Two random requests and what the model itself makes of them.

    Args:
        whole: the model with its own attention.
        vocab_size: ids are drawn below it.
        longest: tokens that a request may have.
        num_pages, page_size: of the pool, whose first pages are written.
    """

    def __init__(self, whole: Whole, vocab_size: int, longest: int, num_pages: int, page_size: int) -> None:
        random = np.random.default_rng(0)
        self._requests: list[IntArray] = []
        pages: list[int] = []
        for length in _LENGTHS:
            tokens = min(length, longest, (num_pages - sum(pages)) * page_size)
            self._requests.append(random.integers(0, vocab_size, tokens))
            pages.append(-(-tokens // page_size))
        self._table = np.zeros((len(pages), max(pages)), np.int32)
        numbers = random.permutation(sum(pages))
        for slot, count in enumerate(pages):
            self._table[slot, :count], numbers = numbers[:count], numbers[count:]
        self._expected = [whole(ids) for ids in self._requests if len(ids)]

    def run(self, paged: Paged, dtype: torch.dtype) -> None:
        """Feed the requests in pieces and compare. Raises UnservedError."""
        errors = torch.cat([_difference(paged(batch), wanted) for batch, wanted in self._batches()])
        error = float(errors.max() if dtype == torch.float32 else errors.median())
        if not error <= _TOLERANCES[dtype]:
            raise UnservedError(
                f"over paged attention its logits differ by {error:.1%} from those of its own attention"
                f" (allowed: {_TOLERANCES[dtype]:.1%})"
            )

    def _batches(self) -> Iterator[tuple[Batch, torch.Tensor]]:
        fed = [0] * len(self._requests)
        for counts in _STEPS:
            stops = [
                min(start + count, len(ids)) for start, count, ids in zip(fed, counts, self._requests, strict=True)
            ]
            spans = [slice(*span) for span in zip(fed, stops, strict=True)]
            positions = [np.arange(*span) for span in zip(fed, stops, strict=True)]
            fed = stops
            rows = np.arange(sum(map(len, positions)))
            if rows.size:
                batch = Batch(
                    tokens=np.concatenate([ids[span] for ids, span in zip(self._requests, spans, strict=True)]),
                    positions=np.concatenate(positions),
                    slots=np.repeat(np.arange(len(spans)), [len(part) for part in positions]),
                    page_table=self._table,
                    logit_rows=rows,
                    output_index=rows,
                )
                yield batch, torch.cat([whole[span] for whole, span in zip(self._expected, spans, strict=False)])


def _difference(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[T] length of each row's difference against the row's own length."""
    wanted = wanted.float()
    difference: torch.Tensor = torch.linalg.vector_norm(logits.float() - wanted, dim=-1)
    size: torch.Tensor = torch.linalg.vector_norm(wanted, dim=-1)
    return difference / size.clamp_min(1e-30)
