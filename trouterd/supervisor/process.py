"""One child process as the supervisor sees it: spawn, control link, heartbeats, death, resources."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trouterd.calls import CallError, OpenCalls
from trouterd.control import (
    Boot,
    Call,
    ControlError,
    Fatal,
    Frame,
    PeerState,
    Ping,
    Pong,
    Ready,
    Reply,
    pack_frame,
    read_frame,
)
from trouterd.interpreter import environment, module_command
from trouterd.memory import GPU_MEMORY

CALL_TIMEOUT = 2.0
"""Seconds that a child gets to answer a call, unless the caller says otherwise."""
WHILE_STARTING = ("set", GPU_MEMORY)
"""Verbs that a child may be asked before it is ready, when it has none of the others yet."""
LAST_WORDS_TIMEOUT = 0.2
"""Seconds that the control link of a dead process may take to end."""
log = logging.getLogger("trouterd.supervisor")


class Child:
    """A role and its current process. States: starting, up, stalled, down."""

    def __init__(
        self,
        name: str,
        module: str,
        threads: int,
        on_frame: Callable[[Child, Ready | Fatal | Call], None],
        on_exit: Callable[[Child, str], None],
    ) -> None:
        """
        Args:
            name: the role: 'api' or a model's name.
            module: Python module with the role's `run`.
            threads: for OMP_NUM_THREADS and its like.
            on_frame: called with what the child says on its own account.
            on_exit: called once per process, with how it ended in words.
        """
        self.name = name
        self.state = "down"
        self.epoch = 0
        self.pid = 0
        self.detail: dict[str, Any] = {}
        """What the child said of itself when it became ready."""
        self.last_words = ""
        self.waits = False
        """It starts, and waits for others as it says."""
        self.started = 0.0
        """Monotonic time of the last spawn."""
        self.start_deadline_from = 0.0
        """Monotonic time from which supervision.start_timeout counts: the last spawn, or the end of a wait for others."""
        self.ready_at = 0.0
        """Monotonic time of Ready; 0 = not ready since the last spawn."""
        self.ever_ready = False
        self.failures = 0
        """Deaths since it last stayed up; sets the back-off."""
        self.steps = 0
        self.step_seconds = 0.0
        self._module = module
        self._threads = threads
        self._on_frame = on_frame
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._burial: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._calls = OpenCalls()
        self._ping_sent = 0.0
        """Monotonic time of the ping that is not answered yet; 0 = none. One at a time: a stopped child piles up nothing."""
        self.exited = asyncio.Event()
        self.exited.set()

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(self.epoch - 1, 0)

    async def spawn(self, boot: Callable[[int], Boot], fds: list[int], variables: Mapping[str, str]) -> None:
        """Start the next process of this role.

        Args:
            boot: the first frame for a given epoch.
            fds: descriptors that it inherits under the same numbers.
            variables: of its environment, over this process's own.

        Raises:
            OSError: no process, memory or descriptor is to be had; nothing is left of the attempt.
        """
        self.epoch += 1
        self.pid = 0
        self.state, self.detail, self.last_words, self.waits = "starting", {}, "", False
        self.started, self.ready_at, self._ping_sent = time.monotonic(), 0.0, 0.0
        self.start_deadline_from = self.started
        self.steps, self.step_seconds = 0, 0.0
        ours, theirs = socket.socketpair()
        # Before the process exists: nothing may be awaited between its start and the end of this method.
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:
                process = self._start(theirs.fileno(), fds, variables)
        except OSError:
            self.hang_up()
            raise
        self._process, self.pid = process, process.pid
        self.exited.clear()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_death)
        self._reading = asyncio.create_task(self._read(reader))
        self.send(boot(self.epoch))

    def send(self, frame: Frame) -> None:
        """Queue a frame; dropped when there is no process."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_frame(frame))

    async def call(self, verb: str, args: dict[str, Any] | None = None, within: float | None = CALL_TIMEOUT) -> Any:
        """Ask the child for a verb, for at most `within` seconds.

        Raises:
            Refused: the child refused.
            CallError: it starts, failed, died or did not answer in time; names the process.
        """
        if self._writer is None:
            raise CallError(f"{self.name} is down")
        if self.state == "starting" and verb not in WHILE_STARTING:
            raise CallError(f"{self.name} is starting; ask again when it is up")
        try:
            async with asyncio.timeout(within):
                return await self._calls.call(self.send, verb, args)
        except TimeoutError as error:
            raise CallError(f"{self.name} did not answer '{verb}' within {within:g} s") from error

    def beat(self, now: float) -> float:
        """Send a ping if none is open; returns for how many seconds the open one has been waiting."""
        if self._ping_sent:
            return now - self._ping_sent
        self._ping_sent = now
        self.send(Ping(number=next(self._numbers)))
        return 0.0

    def peer_state(self) -> PeerState:
        """This process's state for all others."""
        letter = process_state(self.pid) if self.state == "stalled" else ""
        return PeerState(self.name, self.state, self.epoch, self.pid, letter)

    def hang_up(self) -> None:
        """Close the control link: the order to end now."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def kill(self) -> None:
        """SIGKILL, by pidfd: never another process that got the same pid."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _start(self, control_fd: int, fds: list[int], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        options = ("--control-fd", str(control_fd), "--parent", str(os.getpid()), "--module", self._module)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._threads))
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            module_command("trouterd.child", *options),
            stdin=subprocess.DEVNULL,
            pass_fds=[control_fd, *fds],
            env=environment(**threads, TOKENIZERS_PARALLELISM="false", **variables),
            process_group=0,  # a terminal's Ctrl-C is for the supervisor alone
        )
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        return process

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await read_frame(reader)) is not None:
                self._dispatch(frame)
        except ControlError as error:
            log.error("%s: %s; killing it", self.name, error)
            self.kill()

    def _dispatch(self, frame: Frame) -> None:
        match frame:
            case Pong():
                self._ping_sent = 0.0
                self.steps, self.step_seconds = frame.steps, frame.step_seconds
            case Reply():
                self._calls.settle(frame, f"{self.name}: ")
            case Call(verb="last-words"):
                self.last_words = str(frame.args.get("line", ""))
            case Call(verb="waits"):
                self.waits = bool(frame.args.get("waits"))
            case Ready():
                self.detail, self.ready_at, self.ever_ready = frame.detail, time.monotonic(), True
                self._on_frame(self, frame)
            case Call() | Fatal():
                self._on_frame(self, frame)
            case _:
                log.error("%s: unexpected %s", self.name, type(frame).__name__)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._burial = asyncio.create_task(self._bury())

    async def _bury(self) -> None:
        """Read what it said last, then report the end."""
        if self._process is None or self._reading is None:
            return
        status = self._process.wait()
        # The link ends with the process, unless a process of its own still holds it.
        await asyncio.wait({self._reading}, timeout=LAST_WORDS_TIMEOUT)
        self._reading.cancel()
        self.hang_up()
        self._calls.fail(f"{self.name} died")
        self.state = "down"
        self.exited.set()
        self._on_exit(self, exit_words(status))


def exit_words(status: int) -> str:
    """How a process ended, from `Popen.returncode`."""
    if status >= 0:
        return f"exited with code {status}"
    return f"was killed by {signal.Signals(-status).name}"


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat: R running, S sleeping, D disk wait, T stopped, Z dead; '' when it is gone."""
    try:
        # Counted from behind the command's name, which may hold blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def resident_bytes(pid: int) -> int:
    """Memory that the process holds in RAM; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0
