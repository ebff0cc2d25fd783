"""Memory of the devices that a split model is on. What is true of a device must be true of the worst of them."""

from __future__ import annotations

import torch

from models.memory import DeviceMemory
from models.parallel.link import Bytes, Look
from models.parallel.ranks import Ranks


class SplitMemory:
    """As `DeviceMemory`, over all ranks, which nothing else may ask meanwhile. Raises RankLostError.

    Args:
        device: the first rank's.
        ranks: the others.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._device = device
        self._ranks = ranks

    def held(self) -> int:
        """The most bytes that a rank keeps from others, after giving back what it does not use."""
        return max(answer.first for answer in self._all(Look("held")))

    def start_peak(self) -> None:
        """Forget the peaks so far."""
        self._all(Look("start_peak"))

    def peak(self) -> int:
        """The most bytes that a rank has held since `start_peak`."""
        return max(answer.first for answer in self._all(Look("peak")))

    def free_and_total(self) -> tuple[int, int]:
        """Of the device with the least free memory: bytes that nobody holds, and all there are."""
        return min(self.every_device())

    def every_device(self) -> list[tuple[int, int]]:
        """The same of each rank's device, by rank."""
        return [(answer.first, answer.second) for answer in self._all(Look("free_and_total"))]

    def _all(self, order: Look) -> list[Bytes]:
        self._ranks.tell(order)
        own = look(self._device, order)
        return [own, *(answer for answer in self._ranks.answers() if isinstance(answer, Bytes))]


def look(device: torch.device, order: Look) -> Bytes:
    """A rank's answer; a CPU has no memory of its own."""
    if device.type != "cuda":
        return Bytes()
    memory = DeviceMemory(device)
    match order.at:
        case "held":
            return Bytes(memory.held())
        case "peak":
            return Bytes(memory.peak())
        case "start_peak":
            memory.start_peak()
            return Bytes()
        case "free_and_total":
            return Bytes(*memory.free_and_total())
