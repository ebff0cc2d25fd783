"""The sum over ranks with its signals, on one GPU: two ranks are two streams that read each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]

SPAN = 16
WIDTH = 5120
ROUNDS = 30


@dataclass
class Ranks:
    """What two ranks hold, and where each finds the other's."""

    parts: list[torch.Tensor]
    flags: list[torch.Tensor]
    turns: list[torch.Tensor]
    x: list[torch.Tensor]
    out: list[torch.Tensor]
    weight: torch.Tensor
    part_addresses: torch.Tensor
    flag_addresses: torch.Tensor

    @classmethod
    def make(cls, rows: int, dtype: torch.dtype) -> Ranks:
        def each(*shape: int, kind: torch.dtype = dtype) -> list[torch.Tensor]:
            return [torch.zeros(shape, dtype=kind, device="cuda") for _ in range(2)]

        parts, flags = each(2, SPAN, WIDTH), each(2, SPAN, kind=torch.int32)
        return cls(
            parts=parts,
            flags=flags,
            turns=each(SPAN, kind=torch.int32),
            x=each(rows, WIDTH),
            out=each(rows, WIDTH),
            weight=torch.randn(WIDTH, device="cuda").to(dtype),
            part_addresses=torch.tensor([part.data_ptr() for part in parts], device="cuda"),
            flag_addresses=torch.tensor([flag.data_ptr() for flag in flags], device="cuda"),
        )

    def sum(self, rank: int, half: int, *, overlap: bool = False) -> None:
        from models.cuda.kernels.sum_norm import sum_norm

        sum_norm(
            self.part_addresses,
            self.flag_addresses,
            self.turns[rank],
            self.x[rank],
            self.weight,
            1e-6,
            self.out[rank],
            rank=rank,
            offset=half * SPAN * WIDTH,
            span=SPAN,
            overlap=overlap,
        )

    def warm_up(self) -> None:
        """Compile for both ranks while nobody has to wait: the flags are there already."""
        for overlap in (False, True):
            for rank in range(2):
                for flag in self.flags:
                    flag.fill_(1 << 20)
                self.sum(rank, 0, overlap=overlap)
        torch.cuda.synchronize()
        for tensor in (*self.flags, *self.turns, *self.x):
            tensor.zero_()
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, SPAN])
@pytest.mark.parametrize("way", ["plain", "overlap", "graphs"])
def test_two_streams_sum_what_both_have(rows: int, dtype: torch.dtype, way: str) -> None:
    from models.cuda.kernels.rms_norm import rms_norm

    ranks = Ranks.make(rows, dtype)
    ranks.warm_up()
    fresh = torch.randn(ROUNDS, 2, rows, WIDTH, device="cuda").to(dtype)
    if way == "graphs":
        # Begin where turns wrap around.
        for tensor in (*ranks.flags, *ranks.turns):
            tensor.fill_((1 << 31) - 7)
    expected_x, expected = torch.zeros_like(ranks.x[0]), torch.empty_like(ranks.x[0])
    for number in range(ROUNDS):
        total = (fresh[number, 0].float() + fresh[number, 1].float()).to(dtype)
        rms_norm(expected_x, ranks.weight, 1e-6, expected, delta=total, keep=expected_x)

    def work(rank: int) -> None:
        for number in range(ROUNDS):
            ranks.parts[rank][number % 2, :rows].copy_(fresh[number, rank])
            # A rank that is late, now this one and now the other.
            torch.cuda._sleep(20_000 * ((number // 3 + rank) % 2))
            ranks.sum(rank, number % 2, overlap=way == "overlap")

    at_once([captured(partial(work, rank)) if way == "graphs" else partial(work, rank) for rank in range(2)])
    for rank in range(2):
        assert torch.equal(ranks.x[rank], expected_x)
        assert torch.equal(ranks.out[rank], expected)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Replays what `work` enqueues."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def at_once(works: list[Callable[[], None]]) -> None:
    """Each on a stream of its own."""
    torch.cuda.synchronize()
    for work in works:
        with torch.cuda.stream(torch.cuda.Stream()):
            work()
    torch.cuda.synchronize()
