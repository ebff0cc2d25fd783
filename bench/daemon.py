"""Starts a trouterd for a benchmark, and reads what its processes cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

START_TIMEOUT = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running trouterd with its sockets."""

    socket: Path
    control: Path

    def session(self) -> aiohttp.ClientSession:
        """HTTP over the daemon's unix socket."""
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self.socket), limit=0),
            base_url="http://trouterd",
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def ctl(self, *arguments: str) -> Any:
        """Run trouterctl with --json and return what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trouterd.ctl",
            "--control",
            str(self.control),
            "--json",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"trouterctl {' '.join(arguments)} exited with {process.returncode}")
        return json.loads(output)

    async def cpu_seconds(self) -> dict[str, float]:
        """User and system time of every process of the daemon so far, by name."""
        status = await self.ctl("status")
        return {process["name"]: _cpu(process["pid"]) for process in status["processes"]}


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.asynccontextmanager
async def running(folder: Path, config: str) -> AsyncIterator[Daemon]:
    """A daemon with this configuration text, its files and sockets in `folder`; drained at the end.

    Raises:
        RuntimeError: it did not become ready.
    """
    file = folder / "trouterd.toml"
    file.write_text(config)
    daemon = Daemon(folder / "api.sock", folder / "api.ctl")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trouterd.cli",
        "serve",
        "-c",
        str(file),
        "--socket",
        str(daemon.socket),
        "--control",
        str(daemon.control),
    )
    try:
        await _ready(daemon, process)
        yield daemon
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def _ready(daemon: Daemon, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_TIMEOUT), daemon.session() as session:
        while process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get("/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"trouterd exited with {process.returncode} before it was ready")
