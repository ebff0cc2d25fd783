"""How ranks on GPUs sum: tried when they meet, since the best way depends on how the GPUs are linked."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from models.cuda.shard import FusedSums
from models.parallel.symmetric import MOST_ROWS, SymmetricSums, reachable

log = logging.getLogger(__name__)

_SIZES = (1, 8, 32, MOST_ROWS)
"""Rows that are tried."""
_CALLS = 20
"""Sums in one captured graph."""
_REPLAYS = 5
_EPS = 1e-6
_PATIENCE = 10_000_000
"""Looks for another rank's turn while it is not known whether it can be seen at all: some seconds."""


@dataclass(slots=True)
class _Step:
    """One sum and norm of random numbers: x and weight equal on all ranks, the part not."""

    part: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor

    @classmethod
    def make(cls, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> _Step:
        def normal(seed: int, *shape: int) -> torch.Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        x = normal(0, rows, width)
        return cls(normal(2 + dist.get_rank(), rows, width), x, normal(1, width), torch.empty_like(x))

    def plain(self) -> None:
        """By NCCL and a norm."""
        from models.cuda.kernels.rms_norm import rms_norm

        dist.all_reduce(self.part)
        rms_norm(self.x, self.weight, _EPS, self.out, delta=self.part, keep=self.x)

    def fused(self, sums: FusedSums) -> None:
        """By `sums`, with the parts that are there."""
        for place in sums.parts(len(self.x)):
            sums.add_norm(place, self.x, self.weight, _EPS, self.out, overlap=False)


def choose_sums(width: int, dtype: torch.dtype, device: torch.device) -> tuple[FusedSums | None, int]:
    """The fast way to sum and the rows up to which it is the faster one; (None, 0) where it does not work.

    Every rank calls this at the same time, and gets the same answer.
    """
    if not reachable(device):
        log.info("sums by NCCL alone: the GPUs cannot map each other's memory")
        return None, 0
    try:
        sums = SymmetricSums(width, dtype, device)
    except RuntimeError as error:
        log.warning("sums by NCCL alone: %s", " ".join(str(error).split()))
        return None, 0
    if not _right(sums, width, dtype, device):
        log.warning("sums by NCCL alone: ranks do not see each other's memory as they should")
        return None, 0
    limit = torch.tensor([_faster_up_to(sums, width, dtype, device)], device=device)
    # The first rank's clock decides.
    dist.broadcast(limit, src=0)
    return sums, int(limit)


def _right(sums: SymmetricSums, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether both ways agree on all ranks."""
    fine, sums.patience = True, _PATIENCE
    for rows in (1, MOST_ROWS):
        expected, found = (_Step.make(rows, width, dtype, device) for _ in range(2))
        for place in sums.parts(rows):
            place.copy_(found.part)
            sums.add_norm(place, found.x, found.weight, _EPS, found.out, overlap=False)
            expected.part.copy_(found.part)
            expected.plain()
        for a, b in ((found.x, expected.x), (found.out, expected.out)):
            fine &= bool(((a - b).abs() <= 0.03 + 0.03 * b.abs()).all())
    sums.patience = 0
    answers = torch.tensor([int(fine)], device=device)
    dist.all_reduce(answers, op=dist.ReduceOp.MIN)
    return bool(answers)


def _faster_up_to(sums: FusedSums, width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows up to which `sums` is faster than NCCL and a norm."""
    times = []
    for rows in _SIZES:
        step = _Step.make(rows, width, dtype, device)
        step.part.zero_()
        for place in sums.parts(rows):
            place.zero_()
        # The same number of calls on every rank, whatever its clock says.
        times.append((rows, _seconds(partial(step.fused, sums)) / 2, _seconds(step.plain)))
    faster = list(itertools.takewhile(lambda line: line[1] < line[2], times))
    limit = faster[-1][0] if faster else 0
    words = ", ".join(f"{rows} rows {fused * 1e6:.1f} and {plain * 1e6:.1f} us" for rows, fused, plain in times)
    log.info("sum and norm, in one kernel and by NCCL: %s; in one kernel up to %d rows", words, limit)
    return limit


def _seconds(work: Callable[[], None]) -> float:
    """Time of one call within a graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            work()
    best = float("inf")
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3 / _CALLS)
    return best
