"""What the host makes of a step's logits: a token and a destination for every request, and which drafts are accepted."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.base import PromptView, StepResult
from algorithms.drafting import Drafter
from models.batch import Batch, IntArray, StepOutput
from models.sampler import Edits, SamplingRows, sample
from trouterd.worker.answers import ask, param_rows
from trouterd.worker.request import NO_TOKEN, Request
from trouterd.worker.route import WorkerRoute
from trouterd.worker.scheduler import Chunk
from trouterd.worker.verification import verify

log = logging.getLogger(__name__)

FAILED = -1
"""Destination of a row whose algorithm failed."""


@dataclass(slots=True)
class Decisions:
    """Of the R requests whose logits were wanted, in order."""

    tokens: list[int]
    """What this model writes next, behind the drafts that it accepts; NO_TOKEN where it has not read them all."""
    destinations: list[int]
    accepted: list[int]
    """Drafts that are committed."""
    scores: list[float]
    """Of the token, where it is a draft."""


def decide(output: StepOutput, batch: Batch, chunks: Sequence[Chunk], routed: Sequence[bool]) -> Decisions:
    """A token and a destination for every request.

    Args:
        output: what the model said.
        batch: what it was fed.
        chunks: the R chunks whose logits were wanted, in order.
        routed: which of their requests may be handed off now.
    """
    if not chunks:
        return Decisions([], [], [], [])
    rows = [chunk.request for chunk in chunks for _ in range(chunk.wanted)]
    tokens = sample(output.logits, sampling_rows(rows, batch))
    verified = verify(output, tokens, chunks)
    ids = tokens.tolist()
    written = [ids[row] if written else NO_TOKEN for row, written in zip(verified.rows, verified.written, strict=True)]
    may_leave = [
        can and written and not failed
        for can, written, failed in zip(routed, verified.written, verified.failed, strict=True)
    ]
    requests = [chunk.request for chunk in chunks]
    destinations, scores = route(output, tokens, batch, requests, verified.rows, may_leave)
    for number, failed in enumerate(verified.failed):
        if failed:
            destinations[number] = FAILED
    return Decisions(written, destinations, verified.accepted, scores)


def first_writer(request: Request) -> int:
    """Destination of a request that the entry has admitted, before anything of it is computed."""
    route, submit = request.route, request.submit
    if len(route.workers) == 1:
        return 0
    sampling = submit.sampling
    prompt = PromptView(request.tokens, sampling.seed, sampling.choice, route.params | submit.params, submit.score)
    try:
        return checked(route, int(route.algorithm.start(prompt)))
    except (Exception, SystemExit):  # code of users: its faults end this request
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
    rows: Sequence[int],
    routed: Sequence[bool],
) -> tuple[list[int], list[float]]:
    """Destination and score per request, whose deciding rows are `rows`: each route's algorithm sees its own, all others get 0."""
    destinations, scores = [0] * len(requests), [0.0] * len(requests)
    groups: dict[str, list[int]] = {}
    for number, (request, wanted) in enumerate(zip(requests, routed, strict=True)):
        if wanted:
            groups.setdefault(request.route.name, []).append(number)
    device = output.logits.device
    index = torch.from_numpy(batch.output_index).to(device)
    for numbers in groups.values():
        members = [requests[number] for number in numbers]
        whole = len(numbers) == len(tokens)
        pick = slice(None) if whole else torch.tensor([rows[n] for n in numbers], dtype=torch.int64, device=device)
        step = StepResult(
            logits=output.logits[pick],
            hidden=output.hidden[pick],
            tokens=tokens[pick],
            index=index[pick],
            seed=torch.tensor([_signed(r.submit.sampling.seed) for r in members], dtype=torch.int64, device=device),
            choice=torch.tensor([r.submit.sampling.choice for r in members], dtype=torch.int64, device=device),
            params=param_rows(members, device),
            state=[r.scratch for r in members],
        )
        algorithm = members[0].route.algorithm
        if isinstance(algorithm, Drafter):
            given = ask(members[0].route, algorithm.score, step, len(members))
            for number, score in zip(numbers, given or [], strict=False):
                scores[number] = score
            answers = [0 if given else FAILED] * len(members)
        else:
            answers = _destinations(members[0].route, step)
        for number, destination in zip(numbers, answers, strict=True):
            destinations[number] = destination
    return destinations, scores


def _destinations(route: WorkerRoute, step: StepResult) -> list[int]:
    """The algorithm's answer, or FAILED for every row that it has no proper answer for."""
    count = len(step.state)
    given = ask(route, route.algorithm.route, step, count)
    return [checked(route, int(d) if math.isfinite(d) else FAILED) for d in given] if given else [FAILED] * count


def _signed(seed: int) -> int:
    """The bits of a u64 as int64, which is what tensors hold."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
