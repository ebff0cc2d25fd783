"""All children together: who is up, who stalls, who died and when it is started again, and telling the others."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ipc.errors import SegmentError
from trouterd.config import Config
from trouterd.control import Boot, Call, Fatal, Ready
from trouterd.memory import GPU_MEMORY, Memory
from trouterd.supervisor.mps import Mps
from trouterd.supervisor.process import Child
from trouterd.supervisor.rings import RingMesh
from trouterd.supervisor.sizing import Sizing

API = "api"
MAX_BACKOFF = 30.0
SETTLED_SECONDS = 10.0
"""A child that stayed up for this long starts with a fresh back-off when it dies."""
GPU_MEMORY_TIMEOUT = 10.0
"""Seconds that a worker gets to say how much memory its GPUs have free."""
EXIT_FAILURE = 1
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: the configuration or a model is at fault, so that a restart would not help."""
log = logging.getLogger("trouterd.supervisor")


class Fleet:
    """The api and one worker per model."""

    def __init__(
        self,
        config: Config,
        modules: Mapping[str, str],
        mesh: RingMesh,
        turn_fd: int,
        listen_fds: Callable[[], list[int]],
        *,
        on_ready: Callable[[], None],
        on_failure: Callable[[int, str], None],
        on_call: Callable[[Child, Call], None],
    ) -> None:
        """
        Args:
            config: handed to every child.
            modules: Python modules of the roles 'api' and 'worker'.
            mesh: rings between the processes.
            turn_fd: the file of turns that workers inherit.
            listen_fds: sockets that the api inherits.
            on_ready: called each time that all children have become ready.
            on_failure: called with an exit code and one line when the daemon must give up.
            on_call: called with what a child asks of the supervisor.
        """
        self.config = config
        """In force: with every change that `set` made."""
        self.mesh = mesh
        self.stopping = False
        """True: the dead stay dead."""
        self._turn_fd = turn_fd
        self._listen_fds = listen_fds
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._on_call = on_call
        self._respawns: set[asyncio.Task[None]] = set()
        self.mps = Mps(config, os.environ)
        self.sizing = Sizing(config, self._gpu_memory, lambda message: on_failure(EXIT_CONFIG, message))
        self.children = {API: Child(API, modules["api"], 1, self._hear, self._exited)} | {
            name: Child(name, modules["worker"], model.threads, self._hear, self._exited)
            for name, model in config.models.items()
        }

    @property
    def workers(self) -> dict[str, Child]:
        """All children but the api."""
        return {name: child for name, child in self.children.items() if name != API}

    @property
    def all_ready(self) -> bool:
        """Every child serves (a stalled one was ready, and counts until it dies)."""
        return all(child.ready_at for child in self.children.values())

    @property
    def stalled(self) -> list[str]:
        """Names of the children that make no progress."""
        return [child.name for child in self.children.values() if child.state == "stalled"]

    async def start(self) -> None:
        """Spawn every child, and before them the MPS daemon if models share a GPU."""
        await self.mps.start()
        for child in self.children.values():
            await self._try_spawn(child)

    def tick(self, now: float) -> None:
        """Heartbeats: to be called every supervision.heartbeat_interval with the monotonic time."""
        for child in self.children.values():
            if child.state == "starting":
                self._check_start(child, now)
            elif child.state in ("up", "stalled"):
                self._check_progress(child, now)

    def kill_all(self) -> None:
        """SIGKILL whoever lives."""
        for child in self.children.values():
            child.kill()

    async def cancel_respawns(self) -> None:
        """Forget the restarts that were planned."""
        for task in self._respawns:
            task.cancel()
        await asyncio.gather(*self._respawns, return_exceptions=True)

    async def _spawn(self, child: Child) -> None:
        is_api = child.name == API
        listen = self._listen_fds() if is_api else []
        turn_fd = -1 if is_api else self._turn_fd

        def boot(epoch: int) -> Boot:
            inbound, outbound = self.mesh.links(child.name)
            return Boot(child.name, epoch, self.config, inbound, outbound, listen, turn_fd)

        variables = {} if is_api else await self.mps.variables(child.name)
        await child.spawn(boot, self.mesh.fds(child.name) + (listen if is_api else [turn_fd]), variables)
        log.info("%s started: pid %d, epoch %d", child.name, child.pid, child.epoch)
        for other in self.children.values():
            if other is not child and other.state in ("up", "stalled", "down") and other.epoch:
                child.send(other.peer_state())

    async def _respawn(self, child: Child, delay: float) -> None:
        await asyncio.sleep(delay)
        if not self.stopping:
            await self._try_spawn(child)

    async def _try_spawn(self, child: Child) -> None:
        """A start that the system refuses counts as a death: it is tried again, later and later."""
        try:
            await self._spawn(child)
        except OSError as error:
            self._exited(child, f"could not be started: {error.strerror or error}")

    def _hear(self, child: Child, frame: Ready | Fatal | Call) -> None:
        match frame:
            case Ready():
                self._change(child, "up")
                log.info("%s ready after %.1f s %s", child.name, child.ready_at - child.started, _facts(child.detail))
                if self.all_ready:
                    self._on_ready()
            case Fatal(message=message):
                self._on_failure(EXIT_CONFIG, f"{child.name}: {message}")
            case Call():
                self._on_call(child, frame)

    def _change(self, child: Child, state: str) -> None:
        """Put a child into another state and tell all others."""
        child.state = state
        for other in self.children.values():
            if other is not child:
                other.send(child.peer_state())

    async def _gpu_memory(self, name: str) -> dict[int, Memory]:
        answer = await self.children[name].call(GPU_MEMORY, within=GPU_MEMORY_TIMEOUT)
        return msgspec.convert(answer, dict[int, Memory])

    def _exited(self, child: Child, how: str) -> None:
        self._change(child, "down")
        self.sizing.forget(child.name)
        self.mesh.kick(child.name)
        if self.stopping:
            return
        try:
            peers = self.mesh.replace_poisoned(child.name)
        except (SegmentError, OSError) as error:
            self._on_failure(EXIT_FAILURE, f"no new ring in place of a broken one of {child.name}: {error}")
            return
        for peer in peers:
            log.error("the ring between %s and %s was broken; restarting %s too", child.name, peer, peer)
            self.children[peer].kill()
        if child.ready_at and time.monotonic() - child.ready_at >= SETTLED_SECONDS:
            child.failures = 0
        child.failures += 1
        words = f" ({child.last_words})" if child.last_words else ""
        attempts = self.config.supervision.start_attempts
        if not child.ever_ready and child.failures >= attempts:
            self._on_failure(EXIT_FAILURE, f"{child.name} {how} before it was ready, {attempts} times{words}")
            return
        delay = min(self.config.supervision.restart_backoff * 2.0 ** (child.failures - 1), MAX_BACKOFF)
        log.error("%s (pid %d) %s%s; restarting it in %.1f s", child.name, child.pid, how, words, delay)
        task = asyncio.create_task(self._respawn(child, delay))
        self._respawns.add(task)
        task.add_done_callback(self._respawns.discard)

    def _check_start(self, child: Child, now: float) -> None:
        limit = self.config.supervision.start_timeout
        if child.waits or self.sizing.waits(child.name):
            child.start_deadline_from = now  # the others' time, not its own
        elif now - child.start_deadline_from > limit:
            child.last_words = f"not ready within supervision.start_timeout = {limit:g} s"
            child.kill()

    def _check_progress(self, child: Child, now: float) -> None:
        silent, supervision = child.beat(now), self.config.supervision
        if silent > supervision.peer_stall:
            why = f"has not answered for {silent:.1f} s"
        elif child.step_seconds > supervision.stall_after:
            why = f"has been in one step for {child.step_seconds:.1f} s"
        elif child.state == "stalled":
            log.warning("%s (pid %d) makes progress again", child.name, child.pid)
            self._change(child, "up")
            return
        else:
            return
        if child.state != "stalled":
            self._change(child, "stalled")
            letter = child.peer_state().process_state
            rings = "; ".join(map(_ring_line, self.mesh.report(child.name)))
            log.error("%s (pid %d, process state %s) %s; rings: %s", child.name, child.pid, letter, why, rings)


def _facts(detail: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in detail.items())


def _ring_line(ring: Mapping[str, Any]) -> str:
    fill = f"{ring['fill_bytes']} of {ring['capacity_bytes']} bytes"
    return f"{ring['from']}>{ring['to']} {fill}, {ring['spill_records']} messages spilled"
