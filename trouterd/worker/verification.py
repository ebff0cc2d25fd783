"""Which drafts of a step are accepted, once this model has drawn its own token at each of their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from algorithms.drafting import DraftRows, Verifier
from models.batch import StepOutput
from trouterd.worker.answers import ask, param_rows
from trouterd.worker.request import Request
from trouterd.worker.scheduler import Chunk


@dataclass(slots=True)
class Verified:
    """Per chunk whose logits were wanted."""

    rows: list[int] = field(default_factory=list)
    """Among the logits: the row that decides, behind the accepted drafts."""
    written: list[bool] = field(default_factory=list)
    """Its token is this model's next one; else it is an accepted draft, and more of them are to be read."""
    accepted: list[int] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)
    """The algorithm had no proper answer."""


@dataclass(slots=True)
class _Group:
    """Draft rows of one route."""

    members: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    index: list[int] = field(default_factory=list)


def verify(output: StepOutput, tokens: torch.Tensor, chunks: Sequence[Chunk]) -> Verified:
    """Ask the algorithms about all drafts that were read.

    Args:
        output: logits of all wanted rows.
        tokens: what this model draws at them.
        chunks: those whose logits were wanted, in order.
    """
    groups: dict[str, _Group] = {}
    row = 0
    for chunk in chunks:
        if drafts := _drafts_read(chunk):
            _gather(groups.setdefault(chunk.request.route.name, _Group()), chunk, row, drafts)
        row += chunk.wanted
    takes: dict[int, bool] = {}
    broken: set[str] = set()
    for name, group in groups.items():
        answer = _accept(group, output, tokens)
        if answer is None:
            broken.add(name)
        else:
            takes.update(zip(group.rows, map(bool, answer), strict=True))
    return _counted(chunks, takes, broken)


def _drafts_read(chunk: Chunk) -> int:
    """Wanted rows that stand in front of a draft; the last one does not where the chunk ends with the last known id."""
    request = chunk.request
    if request.is_entry or not request.scores:
        return 0
    return chunk.wanted - (chunk.end == len(request.tokens))


def _gather(group: _Group, chunk: Chunk, row: int, drafts: int) -> None:
    request = chunk.request
    first = request.settled
    group.members += [request] * drafts
    group.rows += range(row, row + drafts)
    group.drafts += request.tokens[first : first + drafts]
    group.scores += request.scores[:drafts]
    group.index += range(first - request.prompt_length, first - request.prompt_length + drafts)


def _accept(group: _Group, output: StepOutput, tokens: torch.Tensor) -> list[float] | None:
    device = output.logits.device
    pick = torch.tensor(group.rows, dtype=torch.int64, device=device)
    route = group.members[0].route
    rows = DraftRows(
        logits=output.logits[pick],
        tokens=tokens[pick],
        drafts=torch.tensor(group.drafts, dtype=torch.int64, device=device),
        scores=torch.from_numpy(np.array(group.scores, np.float32)).to(device),
        index=torch.tensor(group.index, dtype=torch.int64, device=device),
        params=param_rows(group.members, device),
    )
    # The registry takes no other side beside a Drafter.
    return ask(route, cast(Verifier, route.algorithm).accept, rows, len(group.rows))


def _counted(chunks: Sequence[Chunk], takes: dict[int, bool], broken: set[str]) -> Verified:
    result = Verified()
    row = 0
    for chunk in chunks:
        drafts = _drafts_read(chunk)
        failed = drafts > 0 and chunk.request.route.name in broken
        count = 0
        while not failed and count < drafts and takes[row + count]:
            count += 1
        result.rows.append(row + min(count, chunk.wanted - 1))
        result.written.append(count < chunk.wanted)
        result.accepted.append(count)
        result.failed.append(failed)
        row += chunk.wanted
    return result
