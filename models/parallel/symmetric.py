"""Sums over ranks that read each other's memory over NVLink or PCIe, each in one kernel with the norm after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

MOST_ROWS = 128
"""Rows of the largest step that is summed so; past that, bandwidth decides and not latency."""


class SymmetricSums:
    """`FusedSums` in memory that all ranks of the default process group have mapped; every rank makes one at the same time.

    Raises:
        RuntimeError: the devices cannot map each other's memory.

    Args:
        width: H.
        dtype: of the parts.
        device: this rank's, which is the current one.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.patience = 0
        """See `sum_norm`."""
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._width = width
        self._memory = _shared(2 * MOST_ROWS * width, dtype, device)
        self._flags = _shared(self._world * MOST_ROWS, torch.int32, device)
        self._turns = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        self._mappings = [_meet(self._memory), _meet(self._flags)]
        self._part_addresses = _addresses(self._memory, self._mappings[0])
        self._flag_addresses = _addresses(self._flags, self._mappings[1])
        # Nobody may tell anything before everybody's flags are zero.
        dist.all_reduce(self._turns)
        torch.cuda.synchronize(device)

    def parts(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two places [rows, H], `rows` at most MOST_ROWS."""
        first, second = self._memory.view(2, MOST_ROWS, self._width)[:, :rows]
        return first, second

    def add_norm(
        self,
        part: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        *,
        overlap: bool,
    ) -> None:
        """As `FusedSums.add_norm`."""
        from models.cuda.kernels.sum_norm import sum_norm

        sum_norm(
            self._part_addresses,
            self._flag_addresses,
            self._turns,
            x,
            weight,
            eps,
            out,
            rank=self._rank,
            offset=(part.data_ptr() - self._memory.data_ptr()) // part.element_size(),
            span=MOST_ROWS,
            patience=self.patience,
            overlap=overlap,
        )


def reachable(device: torch.device) -> bool:
    """Whether the ranks' devices can map each other's memory; the same answer on every rank."""
    own = torch.tensor([device.index or 0], device=device)
    indices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(indices, own)
    others = {int(index) for index in indices} - {int(own)}
    able = all(torch.cuda.can_device_access_peer(device, other) for other in others)
    answers = torch.tensor([int(able)], device=device)
    dist.all_reduce(answers, op=dist.ReduceOp.MIN)
    return bool(answers)


def _shared(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in memory that other ranks can map."""
    from torch.distributed import _symmetric_memory as symmetric

    return symmetric.empty(count, dtype=dtype, device=device).zero_()


def _meet(memory: torch.Tensor) -> Any:
    from torch.distributed import _symmetric_memory as symmetric

    return symmetric.rendezvous(memory, dist.group.WORLD)  # type: ignore[arg-type]


def _addresses(memory: torch.Tensor, mapping: Any) -> torch.Tensor:
    """[world] int64 where every rank's `memory` lies for this one."""
    # A tensor may lie inside of what is mapped, at the same place on every rank.
    place = memory.data_ptr() - mapping.buffer_ptrs[mapping.rank]
    return torch.tensor([pointer + place for pointer in mapping.buffer_ptrs], dtype=torch.int64, device=memory.device)
