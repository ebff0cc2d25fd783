"""Programmatic dependent launch: a kernel starts while the one ahead of it ends, and waits for it where it needs its results.

Before the wait a kernel may read only what neither the kernel ahead nor an overlapping one before that has written, and write
nothing; no program ends without it. Needs compute capability 9.0.
"""

from __future__ import annotations

from typing import Any


def launch_options(overlap: bool) -> dict[str, Any]:
    """What Triton's launch takes for it."""
    return {"launch_pdl": True} if overlap else {}
