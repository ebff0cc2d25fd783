"""CUDA MPS for programs that a benchmark starts side by side on one GPU, as trouterd's supervisor has it for its own models."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from trouterd.config import Config
from trouterd.supervisor.mps import Mps


@contextmanager
def sharing(config: Config, folder: Path) -> Iterator[Mapping[str, Mapping[str, str]]]:
    """Environment variables for each model's process; empty ones where no GPU is shared, MPS is off or cannot be started.

    Args:
        config: who is on which GPU, and `gpu.mps`.
        folder: for MPS's own folder `std.mps`; its path may have 80 bytes.
    """
    server = msgspec.structs.replace(config.server, control=str(folder.resolve() / "std.ctl"))
    mps = Mps(msgspec.structs.replace(config, server=server), os.environ)

    async def started() -> dict[str, dict[str, str]]:
        await mps.start()
        return {name: await mps.variables(name) for name in config.models}

    variables = asyncio.run(started())
    try:
        yield variables
    finally:
        asyncio.run(mps.stop())
