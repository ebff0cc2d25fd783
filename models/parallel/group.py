"""The collectives of a split model: NCCL between GPUs, gloo between processes on a CPU."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from models.config import ModelError
from models.cuda.shard import FusedSums, Shard
from models.parallel.trial import choose_sums

log = logging.getLogger(__name__)

_MEETING = timedelta(seconds=300)
"""How long ranks wait for each other; whoever is lost meanwhile is known long before."""
_LOCAL = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Nobody else is to be met, and no port is to be open to others.
    "NCCL_IB_DISABLE": "1",
    # NVLink multicast: a process that dies with it in use can leave the GPUs of a host out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class Group:
    """Rank `rank` of `world` ranks, each on a device of its own; its operations are queued on the current stream.

    Every rank must call the same operations in the same order, after `join`.
    """

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._sums: FusedSums | None = None
        self._fused_rows = 0

    def shard(self) -> Shard:
        """This rank's part of a model; its sums can be asked for after `join`."""
        return Shard(self.rank, self.world, self.all_reduce, self.gather, self.fused)

    def join(self, store_fd: int, width: int, dtype: torch.dtype) -> None:
        """Meet the other ranks; on GPUs also find out how to sum fast, which takes a second.

        Args:
            store_fd: an open file, empty at first, that all ranks share.
            width: H.
            dtype: of activations.

        Raises:
            ModelError: naming the device and what the library says.
        """
        os.environ.update(_LOCAL)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                # By its descriptor: no name for others to find, and nothing to clean up.
                store=dist.FileStore(f"/proc/self/fd/{store_fd}", self.world),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.world,
                timeout=_MEETING,
                device_id=self.device if on_gpu else None,
            )
        except dist.DistError as error:
            raise ModelError(f"{self.device}: the ranks cannot meet: {' '.join(str(error).split())}") from error
        if on_gpu and self.world > 1:
            self._sums, self._fused_rows = choose_sums(width, dtype, self.device)

    def leave(self) -> None:
        """Give up the connections."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, partial: torch.Tensor) -> None:
        """Replace [T, H] by its sum over all ranks; the same bits everywhere."""
        dist.all_reduce(partial)

    def fused(self, rows: int) -> FusedSums | None:
        """How steps of so many rows are summed together with the norm after it; None: by `all_reduce`."""
        return self._sums if rows <= self._fused_rows else None

    def broadcast(self, packed: torch.Tensor) -> None:
        """Replace a tensor by the first rank's."""
        dist.broadcast(packed, src=0)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """[R, n] of each rank -> [R, world * n] on the first one, ranks in rising order; the others get their own back."""
        if not local.numel():
            return local.new_empty((len(local), local.shape[1] * self.world))
        if self.rank:
            dist.gather(local, dst=0)
            return local
        parts = [torch.empty_like(local) for _ in range(self.world)]
        dist.gather(local, parts, dst=0)
        return torch.cat(parts, dim=-1)
