"""Steps of a model split over GPUs: captured, replayed and timed on all ranks."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models.parallel.leader import LeadingDecoder
from models.rows import Rows

PAGE = 16
SLOTS = 64
LONGEST = 40_960
"""Tokens of a context, in which page tables are measured."""
REPLAYS = 40


def rows_of(batch: int, context: int, device: torch.device) -> Rows:
    """One new token of each of `batch` requests that have `context` tokens."""
    pages, columns = -(-context // PAGE), LONGEST // PAGE
    table = np.zeros((SLOTS, columns), np.int32)
    table[:, :pages] = np.random.default_rng(0).permutation(SLOTS * pages).reshape(SLOTS, pages)

    def put(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(device)

    every = np.arange(batch)
    return Rows(
        tokens=put(every + 1000),
        positions=put(np.full(batch, context - 1)),
        slots=put(every),
        leaders=put(every),
        counts=put(np.ones(batch)),
        page_table=put(table),
        logit_rows=put(every),
    )


@dataclass(slots=True)
class Captured:
    """A step of one size."""

    batch: int
    rows: Rows
    """What the graph reads."""
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Times:
    """Of a way and a batch, in milliseconds."""

    step: float
    """When the next step is queued behind it."""
    launch: float
    """Of the host in a replay with one step under way: median."""
    longest: float
    """The same at most."""
    ahead: int
    """Replays that were queued before one took half a step; all of them if none did."""


def capture(leader: LeadingDecoder, batch: int, context: int) -> Captured:
    """Capture on all ranks, after a plain step."""
    rows = rows_of(batch, context, leader.device)
    leader.forward(rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = leader.forward(rows)
    return Captured(batch, rows, graph, output.logits)


def replay(leader: LeadingDecoder, step: Captured) -> None:
    """Queue a step on all ranks."""
    leader.replaying(step.batch, step.batch)
    step.graph.replay()


def measure(leader: LeadingDecoder, step: Captured) -> Times:
    """Time a step: all replays queued at once, then two in flight."""
    for _ in range(3):
        replay(leader, step)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    queued = [_queue(leader, step, mark) for mark in marks[1:]]
    torch.cuda.synchronize()
    median = statistics.median(a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True))
    ahead = next((number for number, took in enumerate(queued) if took > median / 2), REPLAYS)
    launches = []
    for number in range(REPLAYS):
        # As a worker: look for the end of the step before the last one, then queue the next behind the last one.
        while number > 1 and not marks[number - 2].query():  # type: ignore[no-untyped-call]
            time.sleep(1e-4)
        launches.append(_queue(leader, step, marks[number]))
    torch.cuda.synchronize()
    return Times(median, statistics.median(launches), max(launches), ahead)


def _queue(leader: LeadingDecoder, step: Captured, mark: torch.cuda.Event) -> float:
    """Milliseconds that the host takes to queue a step and a mark behind it."""
    started = time.perf_counter()
    replay(leader, step)
    took = time.perf_counter() - started
    mark.record()
    return took * 1e3


def profile(leader: LeadingDecoder, step: Captured) -> list[tuple[str, int, float]]:
    """Kernel, calls and microseconds of one step on the first rank, longest first; waiting for other ranks counts."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    replays = 5
    with record(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            replay(leader, step)
        torch.cuda.synchronize()
    lines = [
        (event.key, event.count // replays, event.self_device_time_total / replays)
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
    return sorted(lines, key=lambda line: -line[2])
