"""What the host makes of a step's logits: a token and a destination for every row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from algorithms.base import PromptView, StepResult
from models.batch import Batch, IntArray, StepOutput
from models.sampler import Edits, SamplingRows, sample
from trouterd.worker.request import Request
from trouterd.worker.route import WorkerRoute

log = logging.getLogger(__name__)

FAILED = -1
"""Destination of a row whose algorithm failed."""


def decide(
    output: StepOutput, batch: Batch, requests: Sequence[Request], routed: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """Tokens and destinations of the R rows.

    Args:
        output: what the model said.
        batch: what it was fed.
        requests: the R requests whose logits were wanted, in order.
        routed: which of them may be handed off now.
    """
    if not requests:
        return [], []
    tokens = sample(output.logits, sampling_rows(requests, batch))
    return tokens.tolist(), route(output, tokens, batch, requests, routed)


def first_writer(request: Request) -> int:
    """Destination of a request that the entry has admitted, before anything of it is computed."""
    route, submit = request.route, request.submit
    if len(route.workers) == 1:
        return 0
    sampling = submit.sampling
    prompt = PromptView(request.tokens, sampling.seed, sampling.choice, route.params | submit.params, submit.score)
    try:
        return checked(route, int(route.algorithm.start(prompt)))
    except Exception:  # code of users: its faults end this request
        log.exception("route '%s': start() failed; the request ends with an error", route.name)
        return FAILED


def checked(route: WorkerRoute, destination: int) -> int:
    """A destination as an algorithm gave it, or FAILED for one that the route does not have."""
    if 0 <= destination < len(route.workers):
        return destination
    log.error("route '%s': destination %d, but the route has %d models", route.name, destination, len(route.workers))
    return FAILED


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
            banned = sorted(request.ending_ids)
            rows += [row] * len(banned)
            ids += banned
    if not rows:
        return None
    return Edits(np.array(rows), np.array(ids), np.full(len(rows), -np.inf, dtype=np.float32))


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
    count = len(step.state)
    try:
        answer = [int(destination) for destination in route.algorithm.route(step).tolist()]
    except Exception:  # code of users: its faults end the requests of this route, not their batch mates
        log.exception("route '%s': route() failed; its %d requests end with an error", route.name, count)
        return [FAILED] * count
    if len(answer) != count:
        log.error("route '%s': route() gave %d destinations for %d rows", route.name, len(answer), count)
        return [FAILED] * count
    return [checked(route, destination) for destination in answer]


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
