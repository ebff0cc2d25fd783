"""One forward pass: from chunks to a batch, and from logits to a token and a destination for every row."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.base import StepResult
from models.batch import Batch, IntArray, ModelRunner, PageTable, StepOutput
from models.sampler import Edits, SamplingRows, sample
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute
from trouterd.worker.scheduler import Chunk

log = logging.getLogger(__name__)

FAILED = -1
"""Destination of a row whose algorithm failed."""


@dataclass(slots=True)
class Outcome:
    """What a step decided, in the order of the chunks that wanted logits."""

    tokens: list[int]
    destinations: list[int]
    """0 = stay, k = the k-th other model of the route, FAILED."""
    seconds: float


class Stepper:
    """Runs batches on a model runner. `build` reads requests and belongs to the decode loop; `run` touches tensors and the
    requests' scratch space only, so that it may run in another thread while the loop serves I/O."""

    def __init__(self, runner: ModelRunner, page_table: PageTable) -> None:
        self.runner = runner
        self.page_table = page_table
        self.steps = 0
        self.started = 0.0
        """time.monotonic() at which the step in progress began; 0 when none is."""

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        """The batch that feeds the chunks."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        output_index: list[int] = []
        for chunk in chunks:
            request, count = chunk.request, chunk.count
            first = request.fed
            if count == 1:
                tokens.append(request.tokens[first])
                positions.append(first)
                slots.append(request.slot)
            else:
                tokens += request.tokens[first : first + count]
                positions += range(first, first + count)
                slots += [request.slot] * count
            if chunk.wants_logits:
                logit_rows.append(len(tokens) - 1)
                output_index.append(request.output_length)
        return Batch(
            tokens=np.array(tokens, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            slots=np.array(slots, dtype=np.int64),
            page_table=self.page_table,
            logit_rows=np.array(logit_rows, dtype=np.int64),
            output_index=np.array(output_index, dtype=np.int64),
        )

    def run(self, batch: Batch, requests: Sequence[Request], routed: Sequence[bool]) -> Outcome:
        """Forward, sample and route.

        Args:
            batch: from `build`.
            requests: the R requests whose logits are wanted, in order.
            routed: which of them may be handed off now.
        """
        self.started = begin = time.monotonic()
        try:
            with torch.inference_mode():
                output = self.runner.step(batch)
                if not requests:
                    return Outcome([], [], time.monotonic() - begin)
                tokens = sample(output.logits, sampling_rows(requests, batch))
                destinations = route(output, tokens, batch, requests, routed)
            return Outcome(tokens.tolist(), destinations, time.monotonic() - begin)
        finally:
            self.started = 0.0
            self.steps += 1


def sampling_rows(requests: Sequence[Request], batch: Batch) -> SamplingRows:
    """Sampling parameters of the R rows."""
    samplings = [r.submit.sampling for r in requests]
    bans = _bans(requests, batch.output_index)
    if bans is None and all(s.temperature == 0 for s in samplings):
        return SamplingRows.greedy(len(samplings))
    return SamplingRows(
        temperature=np.array([s.temperature for s in samplings], dtype=np.float32),
        top_k=np.array([s.top_k for s in samplings], dtype=np.int64),
        top_p=np.array([s.top_p for s in samplings], dtype=np.float32),
        min_p=np.array([s.min_p for s in samplings], dtype=np.float32),
        seed=np.array([s.seed for s in samplings], dtype=np.uint64),
        choice=np.array([s.choice for s in samplings], dtype=np.int64),
        output_index=batch.output_index,
        bias=bans,
    )


def _bans(requests: Sequence[Request], output_index: IntArray) -> Edits | None:
    """Minus infinity for the ids that would end an answer before its min_tokens."""
    rows: list[int] = []
    ids: list[int] = []
    for row, request in enumerate(requests):
        if request.submit.sampling.min_tokens > output_index[row]:
            banned = _banned(request)
            rows += [row] * len(banned)
            ids += banned
    if not rows:
        return None
    return Edits(np.array(rows), np.array(ids), np.full(len(rows), -np.inf, dtype=np.float32))


def _banned(request: Request) -> list[int]:
    """Ids that would end the answer before min_tokens."""
    sampling = request.submit.sampling
    ends = frozenset() if sampling.ignore_eos else request.route.eos_ids
    return sorted(ends.union(sampling.stop_token_ids))


def route(
    output: StepOutput,
    tokens: torch.Tensor,
    batch: Batch,
    requests: Sequence[Request],
    routed: Sequence[bool],
) -> list[int]:
    """Destination per row: each route's algorithm sees its own rows, all others get 0."""
    destinations = [0] * len(requests)
    groups: dict[str, list[int]] = {}
    for row, (request, wanted) in enumerate(zip(requests, routed, strict=True)):
        if wanted:
            groups.setdefault(request.route.name, []).append(row)
    device = output.logits.device
    index = torch.from_numpy(batch.output_index).to(device)
    for rows in groups.values():
        members = [requests[row] for row in rows]
        whole = len(rows) == len(requests)
        pick = slice(None) if whole else torch.tensor(rows, dtype=torch.int64, device=device)
        step = StepResult(
            logits=output.logits[pick],
            hidden=output.hidden[pick],
            tokens=tokens[pick],
            index=index[pick],
            seed=torch.tensor([_signed(r.submit.sampling.seed) for r in members], dtype=torch.int64, device=device),
            choice=torch.tensor([r.submit.sampling.choice for r in members], dtype=torch.int64, device=device),
            params=_param_rows(members, device),
            state=[r.scratch for r in members],
        )
        for row, destination in zip(rows, _destinations(members[0].route, step), strict=True):
            destinations[row] = destination
    return destinations


def _destinations(route: WorkerRoute, step: StepResult) -> list[int]:
    """The algorithm's answer, or FAILED for every row that it has no proper answer for."""
    count, models = len(step.state), len(route.workers)
    try:
        answer = [int(destination) for destination in route.algorithm.route(step).tolist()]
    except Exception:  # code of users: its faults end the requests of this route, not their batch mates
        log.exception("route '%s': route() failed; its %d requests end with an error", route.name, count)
        return [FAILED] * count
    if len(answer) != count:
        log.error("route '%s': route() gave %d destinations for %d rows", route.name, len(answer), count)
        return [FAILED] * count
    wrong = {destination for destination in answer if not 0 <= destination < models}
    if wrong:
        log.error("route '%s': destinations %s, but the route has %d models", route.name, sorted(wrong), models)
    return [FAILED if destination in wrong else destination for destination in answer]


def _param_rows(members: Sequence[Request], device: torch.device) -> dict[str, torch.Tensor]:
    """The route's parameters per row, with each request's overrides laid over them."""
    current = members[0].route.params
    count = len(members)
    if not any(r.submit.params for r in members):
        return {
            name: torch.full((count,), value, dtype=torch.float32, device=device) for name, value in current.items()
        }
    return {
        name: torch.tensor([r.submit.params.get(name, value) for r in members], dtype=torch.float32, device=device)
        for name, value in current.items()
    }


def _signed(seed: int) -> int:
    """The bits of a u64 as int64, which is what tensors hold."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
