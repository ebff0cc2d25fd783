"""The daemon's main process: from opened sockets to an honest exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ipc.sweep import sweep
from trouterd.calls import CallError, Refused, reply_to
from trouterd.config import Config
from trouterd.control import Call
from trouterd.memory import KV_TOKENS, Claim
from trouterd.settings import ConfigError, differences
from trouterd.supervisor.control_server import ControlServer
from trouterd.supervisor.fleet import API, EXIT_FAILURE, Fleet
from trouterd.supervisor.process import Child
from trouterd.supervisor.rings import RingMesh
from trouterd.supervisor.sockets import CONTROL_MODE, Listeners, UnixListener, open_unix
from trouterd.supervisor.systemd import InheritedSockets, Notifier
from trouterd.supervisor.verbs import Verbs

ROLE_MODULES = {"api": "trouterd.api.main", "worker": "trouterd.worker.main"}
FORCED_EXIT = 0.35
"""Seconds from the order to end now until workers are killed; error frames to clients go out in it."""
CLEAN_EXIT = 1.0
"""The same after a drain, when nothing runs any more."""
LAST_FRAMES = 2.0
"""Seconds that the api gets on top, which ends as soon as all clients have been told: on a busy host not at once."""
MAX_FILES = 1 << 16
log = logging.getLogger("trouterd.supervisor")


class Supervisor:
    """Runs one daemon. Use: `code = await Supervisor(config).run()` in a process's main thread."""

    def __init__(
        self,
        config: Config,
        *,
        modules: Mapping[str, str] = ROLE_MODULES,
        reload: Callable[[], Config] | None = None,
        parent: int = 0,
    ) -> None:
        """
        Args:
            config: as `trouterd.settings.load` gives it.
            modules: Python modules of the roles 'api' and 'worker'.
            reload: reads the configuration again, on SIGHUP.
            parent: process id of who started this process and takes it along, however that one ends; 0: nobody does.
        """
        self._config = config
        self._parent = parent
        self._modules = modules
        self._reload = reload
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._failure = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Serve until told to stop.

        Returns:
            The exit code: 0 drained; 1 forced, answers cut off or failed meanwhile, or a process that would not start; 78 a model
            or the configuration is at fault.

        Raises:
            SocketError: an address cannot be opened (`SocketInUseError`: another process answers there).
            SegmentError: not enough shared memory for the rings.
        """
        # Before there is anything that a signal's default action would leave behind; it is acted on once children start.
        self._handle_signals()
        _raise_file_limit()
        for name in sweep():
            log.info("removed the stale shared memory segment %s", name)
        with contextlib.ExitStack() as stack:
            self._notifier = Notifier(os.environ)
            stack.callback(self._notifier.close)
            inherited = InheritedSockets(os.environ)
            server = self._config.server
            self._listeners = Listeners.open(server, inherited.api)
            stack.callback(self._listeners.close)
            control: UnixListener | None = None
            if inherited.control is None:
                control = open_unix("server.control", Path(server.control), CONTROL_MODE)
                stack.callback(control.close)
            mesh = RingMesh([API, *self._config.models], self._config.rings)
            stack.callback(mesh.close)
            # Without a name: nobody can remove it, or have the same one.
            turn = os.memfd_create("turns of trouterd")
            stack.callback(os.close, turn)
            self._fleet = Fleet(
                self._config,
                self._modules,
                mesh,
                turn,
                lambda: self._listeners.fds,
                on_ready=self._all_ready,
                on_failure=self._fail,
                on_call=self._child_call,
            )
            self._verbs = Verbs(self._fleet, lambda: self._listeners.addresses, self.drain)
            return await self._serve(control.sock if control else inherited.control)

    def stop(self, why: str) -> None:
        """Drain; a second call forces."""
        if not self._stop.is_set():
            log.info("%s: draining for at most %g s", why, self._fleet.config.server.drain_timeout)
            self._stop.set()
        else:
            log.warning("%s: stopping now", why)
            self._force.set()

    def drain(self, why: str) -> None:
        """Drain; joins a drain that is going on."""
        if self._stop.is_set():
            log.info("%s: already draining", why)
        else:
            self.stop(why)

    async def _serve(self, control: Any) -> int:
        self._follow_parent()
        server = ControlServer(self._verbs.answer)
        await server.start(control)
        ticking = asyncio.create_task(self._tick_forever())
        try:
            await self._fleet.start()
            await self._stop.wait()
            return await self._end()
        finally:
            ticking.cancel()
            self._fleet.stopping = True
            await self._fleet.cancel_respawns()
            self._fleet.kill_all()
            await asyncio.gather(*(child.exited.wait() for child in self._fleet.children.values()))
            await self._fleet.mps.stop()
            await server.aclose()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number.name)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    def _follow_parent(self) -> None:
        if not self._parent:
            return
        loop, words = asyncio.get_running_loop(), f"the parent (pid {self._parent}) is gone"
        try:
            parent = os.pidfd_open(self._parent)
        except ProcessLookupError:
            self.stop(words)
            return

        def gone() -> None:
            loop.remove_reader(parent)
            os.close(parent)
            self.stop(words)

        loop.add_reader(parent, gone)
        if os.getppid() != self._parent:  # it ended before, and the id is another one's
            gone()

    def _hang_up(self) -> None:
        task = asyncio.create_task(self._reload_live_keys())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _all_ready(self) -> None:
        where = " and ".join(self._listeners.addresses)
        log.info("ready: %s", where)
        self._notifier.send("READY=1", f"STATUS=serving on {where}")

    def _fail(self, code: int, message: str) -> None:
        """Give up: one line, then end at once."""
        if not self._failure:
            log.critical("%s", message)
            self._failure = code
        self._stop.set()
        self._force.set()

    def _child_call(self, child: Child, call: Call) -> None:
        answer: Coroutine[Any, Any, Any]
        if call.verb == KV_TOKENS:
            answer = self._fleet.sizing.agree(child.name, msgspec.convert(call.args["claim"], Claim))
        else:
            answer = self._verbs.answer(call.verb, call.args, child.name)
        task = asyncio.create_task(answer)
        self._tasks.add(task)

        def reply(outcome: asyncio.Task[Any]) -> None:
            self._tasks.discard(outcome)
            child.send(reply_to(call, outcome))

        task.add_done_callback(reply)

    async def _tick_forever(self) -> None:
        interval = self._config.supervision.heartbeat_interval
        if self._notifier.watchdog_seconds:
            interval = min(interval, self._notifier.watchdog_seconds / 3)
        while True:
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - due > interval:
                continue  # this process was held up itself, so the children's silence says nothing yet
            try:
                self._fleet.tick(now)
            except Exception:
                log.exception("supervisor tick failed")
            if self._notifier.watchdog_seconds and not self._fleet.stalled:
                self._notifier.send("WATCHDOG=1")

    async def _end(self) -> int:
        """Drain if there is time, then end the children."""
        fleet = self._fleet
        fleet.stopping = True
        self._notifier.send("STOPPING=1", "STATUS=draining")
        # The api alone holds them now: it answers 503 or closes, and nobody waits in a queue that no one reads.
        self._listeners.stop()
        # Nobody waits for them, but models that take turns would wait until they have started.
        for worker in fleet.workers.values():
            if not worker.ready_at:
                worker.kill()
        whole = False
        if not self._force.is_set():
            whole = await self._drain(fleet.config.server.drain_timeout)
        await self._end_children(CLEAN_EXIT if whole else FORCED_EXIT)
        if self._failure:
            return self._failure
        log.info("stopped" if whole else "stopped before every answer was finished")
        return 0 if whole else EXIT_FAILURE

    async def _drain(self, seconds: float) -> bool:
        """True when every running answer was finished within the time and nobody forced."""
        draining = asyncio.create_task(self._drain_children(max(seconds - FORCED_EXIT, seconds * 0.5)))
        forcing = asyncio.create_task(self._force.wait())
        await asyncio.wait({draining, forcing}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        forcing.cancel()
        if not draining.done():
            draining.cancel()
            return False
        return draining.result()

    async def _drain_children(self, seconds: float) -> bool:
        """The api first, since it takes the requests; then the workers are idle at once."""
        deadline = time.monotonic() + seconds
        api = self._fleet.children[API]
        if not api.ready_at or api.state == "down":
            return True
        try:
            result = await api.call("drain", {"timeout": seconds}, None)
        except (CallError, Refused) as error:
            log.error("drain: %s", error)
            return False
        for worker in self._fleet.workers.values():
            if worker.state == "up":
                await self._drain_worker(worker, max(deadline - time.monotonic(), 0.05))
        cut, failed = result["cut"], result["failed"]
        if failed:
            log.warning("drain: %d answer%s failed", failed, "" if failed == 1 else "s")
        if cut:
            log.warning("drain: %d answer%s cut off after %g s", cut, " was" if cut == 1 else "s were", seconds)
        return not (cut or failed)

    async def _drain_worker(self, worker: Child, seconds: float) -> None:
        """Every answer is finished: a worker that dies now, or has died unnoticed, costs nobody anything."""
        try:
            await worker.call("drain", {}, seconds)
        except (CallError, Refused) as error:
            log.warning("drain: %s", error)

    async def _end_children(self, seconds: float) -> None:
        """Hang up on all; who is not gone in time, or never became ready, is killed."""
        for child in self._fleet.children.values():
            child.hang_up()
            if not child.ready_at:
                child.kill()
        ends = [asyncio.create_task(child.exited.wait()) for child in self._fleet.children.values()]
        await asyncio.wait(ends, timeout=seconds)
        for worker in self._fleet.workers.values():
            worker.kill()
        await asyncio.wait(ends, timeout=LAST_FRAMES)
        self._fleet.kill_all()
        await asyncio.gather(*ends)

    async def _reload_live_keys(self) -> None:
        """SIGHUP: apply what changed in the file, where it is live."""
        if self._reload is None:
            return
        try:
            wanted = self._reload()
        except ConfigError as error:
            log.error("reload: the configuration is not used: %s", "; ".join(error.problems))
            return
        changes = dict(differences(self._fleet.config, wanted))
        while changes:
            refused: dict[str, Refused] = {}
            for name, value in changes.items():
                try:
                    await self._verbs.set_key(name, value, "reload")
                except Refused as error:
                    refused[name] = error
            if len(refused) == len(changes):
                for problem in refused.values():
                    log.warning("reload: %s", problem)
                return
            # One may only fit when another has changed: two models' thresholds.
            changes = {name: changes[name] for name in refused}


def _raise_file_limit() -> None:
    """As many open connections as the system allows: the usual soft limit of 1024 is less than one busy api needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
