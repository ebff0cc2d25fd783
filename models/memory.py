"""Memory of one CUDA device as its models' processes see it: what this process holds, what anybody has left."""

from __future__ import annotations

import gc

import torch


class DeviceMemory:
    """Counts what torch's allocator holds on a device. Graphs' private pools are among it, the CUDA context is not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def held(self) -> int:
        """Bytes that this process keeps from others, after giving back what it does not use."""
        gc.collect()  # graphs and runners hold each other in cycles
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def start_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most bytes that this process has held since `start_peak`."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that nobody holds, and all there are."""
        free, total = torch.cuda.mem_get_info(self.device)
        return free, total

    def every_device(self) -> list[tuple[int, int]]:
        """The same of each of the model's devices: of this one."""
        return [self.free_and_total()]
