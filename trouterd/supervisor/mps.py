"""CUDA MPS for models that share a GPU: one daemon of our own, in a folder of our own, ended with the last worker.

Without it the kernels of two processes take turns on a GPU; with it they run side by side, and each process can be kept to a
part of the multiprocessors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from trouterd.config import Config

CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 10.0
"""Seconds that one command to the daemon, or its end, may take."""
_POLL = 0.02
_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_PERCENT_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_LONGEST_PIPE = 107 - len("/control_privileged")
"""Bytes of the pipe folder's path, so that the daemon's sockets in it have paths that the system takes."""
log = logging.getLogger("trouterd.supervisor")


class Mps:
    """The MPS daemon of this trouterd, or the one that CUDA_MPS_PIPE_DIRECTORY names, or none."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ
        self._folder = Path(config.server.control).with_suffix(".mps")
        self._wanted = config.gpu.mps == "auto" and bool(config.shared_gpus)
        self._foreign = _PIPE_VARIABLE in environ
        self._running = False
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the daemon if models share a GPU; what a predecessor that was killed has left is ended first."""
        if _is_own(self._folder) and shutil.which(CONTROL):
            await self._end()
        if not self._wanted:
            return
        if self._foreign:
            log.info("gpu.mps: using the daemon of %s=%s", _PIPE_VARIABLE, self._environ[_PIPE_VARIABLE])
            return
        await self._launch()

    async def variables(self, name: str) -> dict[str, str]:
        """Environment of a worker that is about to be started. A daemon that has died meanwhile is started again first."""
        if not self._wanted or not set(self._config.models[name].gpus) & set(self._config.shared_gpus):
            return {}
        percent = self._config.models[name].sm_percent
        limit = {_PERCENT_VARIABLE: str(percent)} if percent else {}
        if self._foreign:
            return limit
        async with self._lock:
            if self._running and not await self._answers():
                log.error("gpu.mps: the MPS daemon is gone; starting it again")
                await self._launch()
        return self._directories() | limit if self._running else {}

    async def stop(self) -> None:
        """End the daemon, if it is ours. Its clients must be gone."""
        if self._running:
            self._running = False
            await self._end()

    async def _launch(self) -> None:
        self._running = False
        problem = self._prepare() or await self._spawn()
        if problem:
            log.warning("gpu.mps: %s; models that share a GPU take turns on it", problem)
            return
        self._running = True
        log.info("gpu.mps: started, in %s", self._folder)

    def _prepare(self) -> str:
        """Make the folders; why that is not possible, or ''."""
        if shutil.which(CONTROL) is None:
            return f"no {CONTROL} on the PATH"
        pipe = self._folder / "pipe"
        if len(os.fsencode(pipe)) > _LONGEST_PIPE:
            return f"the path {pipe} is too long for the daemon's sockets; choose a shorter server.control"
        try:
            for folder in (self._folder, pipe, self._folder / "log"):
                folder.mkdir(mode=0o700, exist_ok=True)
                if not _is_own(folder):
                    return f"{folder} is not a folder of our own"
                folder.chmod(0o700)
        except OSError as error:
            return f"cannot make {error.filename}: {error.strerror}"
        return ""

    async def _spawn(self) -> str:
        """Start the daemon; why it did not start, or ''."""
        output = self._folder / "log" / "start.log"
        code = await self._run("-d", output=output)
        words = output.read_text(errors="replace").split() if output.exists() else []
        said = f": {' '.join(words)}" if words else ""
        if code is None:
            return f"{CONTROL} -d did not return within {PATIENCE:g} s{said}"
        if code:
            return f"{CONTROL} -d failed with code {code}{said}"
        if await _happens(self._answers):
            return ""
        await self._end()
        return f"the MPS daemon does not answer{said}"

    async def _end(self) -> None:
        """Have the daemon in our folder quit, kill it if it does not, and remove the folder."""
        await self._run(command="quit")

        async def gone() -> bool:
            return not self._daemon_pid()

        if not await _happens(gone) and (pid := self._daemon_pid()):
            log.warning("gpu.mps: the MPS daemon (pid %d) does not quit; killing it", pid)
            with contextlib.suppress(ProcessLookupError):  # it does, at last
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _answers(self) -> bool:
        """Whether the daemon can be reached."""
        return await self._run(command="get_server_list") == 0

    def _daemon_pid(self) -> int:
        """The live daemon of our folder; 0 if there is none."""
        try:
            pid = int((self._folder / "pipe" / f"{CONTROL}.pid").read_text())
            # A pid may have gone to another process since.
            return pid if CONTROL in Path(f"/proc/{pid}/cmdline").read_text() else 0
        except (OSError, ValueError):
            return 0

    async def _run(self, *arguments: str, command: str = "", output: Path | None = None) -> int | None:
        """Run the control program with our folders: give the daemon a command, or start it.

        Returns:
            Its exit code; None when it cannot be run or took too long.
        """
        # The daemon sees all GPUs and its clients pick theirs: CUDA_VISIBLE_DEVICES at both ends would be applied twice.
        environ = {name: value for name, value in self._environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        with (output or Path(os.devnull)).open("wb") as sink:
            try:
                process = await asyncio.create_subprocess_exec(
                    CONTROL,
                    *arguments,
                    stdin=asyncio.subprocess.PIPE if command else asyncio.subprocess.DEVNULL,
                    stdout=sink,  # no pipe: the daemon would keep it open
                    stderr=sink,
                    env=environ | self._directories(),
                    start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
                )
            except OSError:
                return None
            try:
                async with asyncio.timeout(PATIENCE):
                    await process.communicate(f"{command}\n".encode() if command else None)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                    process.kill()
                await process.wait()
                return None
        return process.returncode

    def _directories(self) -> dict[str, str]:
        return {_PIPE_VARIABLE: str(self._folder / "pipe"), _LOG_VARIABLE: str(self._folder / "log")}


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, no link to one, and belongs to this process's user."""
    try:
        held = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(held.st_mode) and held.st_uid == os.geteuid()


async def _happens(condition: Callable[[], Awaitable[bool]]) -> bool:
    """Whether a condition comes true before patience ends."""
    begun = time.monotonic()
    while True:
        if await condition():
            return True
        if time.monotonic() - begun > PATIENCE:
            return False
        await asyncio.sleep(_POLL)
