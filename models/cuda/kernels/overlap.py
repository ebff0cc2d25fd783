"""Programmatic dependent launch: a kernel starts while the one ahead of it ends, and waits for it where it needs its results.

Before the wait a kernel may read only what neither the kernel ahead nor an overlapping one before that has written, and write
nothing; no program ends without it.
"""

from __future__ import annotations

from typing import Any

import torch

_CAPABILITY = (9, 0)


def can_overlap(device: torch.device) -> bool:
    """Whether the device has it: compute capability 9.0 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def launch_options(overlap: bool) -> dict[str, Any]:
    """What Triton's launch takes for it."""
    return {"launch_pdl": True} if overlap else {}
