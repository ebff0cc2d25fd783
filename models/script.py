"""A runner without a model: step k of every request puts all mass on the k-th id of a script.

For tests and for measuring the overhead around a model: a step costs no forward pass, only its configured delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta

from models.batch import Batch, StepOutput

# Low enough for exp() to give exactly 0, finite so that 0 * log 0 stays 0 in entropies.
_NO_MASS = -1e4

MAX_VOCABULARY = 1 << 20
"""Ids; the table of a script has a row of so many logits for each of its steps."""

Step = int | Sequence[float]
"""An id that takes all mass, or a whole row of logits."""


class ScriptFile(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON form of a script."""

    vocab_size: Annotated[int, Meta(ge=1, le=MAX_VOCABULARY)]
    eos: int
    """What follows the last step of a script that does not cycle."""
    ids: list[int] = []
    delay_ms: Annotated[float, Meta(ge=0)] = 0.0
    cycle: bool = False
    logits: list[list[float] | None] = []
    """Logits rows that stand in for the ids of the same index; null keeps the id."""
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 8
    context_length: Annotated[int, Meta(ge=1, le=1 << 30)] = 4096
    page_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    num_pages: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096


class ScriptError(ValueError):
    """A script cannot be read; the message names file and field."""


class ScriptRunner:
    """ModelRunner that follows a script.

    Args:
        script: what each step yields by output index: a function, or a sequence of ids or logits rows.
        vocab_size: V.
        eos: the id after a sequence's end, when it does not cycle.
        cycle: start a sequence over at its end.
        delay_ms: time that each step takes at least, blocking its thread as a forward pass would.
        fail_at: output index at which a step raises RuntimeError.
    """

    def __init__(
        self,
        script: Callable[[int], Step] | Sequence[Step],
        *,
        vocab_size: int,
        eos: int = 0,
        cycle: bool = False,
        delay_ms: float = 0.0,
        fail_at: int | None = None,
        hidden_size: int = 8,
        context_length: int = 4096,
        page_size: int = 16,
        num_pages: int = 4096,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.embedding: torch.Tensor | None = None
        self.context_length = context_length
        self.page_size = page_size
        self.num_pages = num_pages
        self.delay_ms = delay_ms
        self.fail_at = fail_at
        self.steps = 0
        self._function = script if callable(script) else None
        self._cycle = cycle
        # The last table row is the end: where indices past the script are sent.
        steps = [] if callable(script) else [*script, eos]
        self._table = torch.cat([self._row(step) for step in steps]) if steps else torch.empty(0, vocab_size)

    @classmethod
    def load(cls, path: Path) -> ScriptRunner:
        """Read a `ScriptFile`. Raises ScriptError."""
        try:
            script = msgspec.json.decode(path.read_bytes(), type=ScriptFile)
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise ScriptError(f"{path}: {error}") from error
        steps: list[Step] = list(script.ids)
        steps += [script.eos] * (len(script.logits) - len(steps))
        for index, row in enumerate(script.logits):
            if row is not None:
                steps[index] = row
        settings: dict[str, Any] = {
            name: getattr(script, name) for name in script.__struct_fields__ if name not in ("ids", "logits")
        }
        try:
            return cls(steps, **settings)
        except ScriptError as error:
            raise ScriptError(f"{path}: {error}") from error

    @property
    def inline(self) -> bool:
        """True without a delay: the step is over before another thread could start it."""
        return self.delay_ms == 0

    def step(self, batch: Batch) -> StepOutput:
        """Logits of the script's steps `batch.output_index`; hidden states are zero."""
        self.steps += 1
        end = time.monotonic() + self.delay_ms / 1e3
        index = batch.output_index
        if self.fail_at is not None and (index == self.fail_at).any():
            raise RuntimeError(f"script fails at step {self.fail_at} as it was told to")
        output = StepOutput(logits=self._logits(index), hidden=torch.zeros(len(index), self.hidden_size))
        # To a moment rather than for a while: what the script itself costs is part of the delay.
        if (left := end - time.monotonic()) > 0:
            time.sleep(left)
        return output

    def _logits(self, index: npt.NDArray[np.int64]) -> torch.Tensor:
        if self._function is not None:
            rows = [self._row(self._function(int(k))) for k in index]
            return torch.cat(rows) if rows else torch.empty(0, self.vocab_size)
        length = len(self._table) - 1
        place = index % length if self._cycle and length else np.minimum(index, length)
        return self._table[torch.from_numpy(place)]

    def _row(self, step: Step) -> torch.Tensor:
        if isinstance(step, Sequence):
            if len(step) != self.vocab_size:
                raise ScriptError(f"logits: a row has {len(step)} values, vocab_size is {self.vocab_size}")
            return torch.tensor([step], dtype=torch.float32)
        if not 0 <= step < self.vocab_size:
            raise ScriptError(f"ids: {step} is outside the vocabulary of {self.vocab_size}")
        row = torch.full((1, self.vocab_size), _NO_MASS)
        row[0, step] = 0.0
        return row
