"""Toy children for the real supervisor: an api that answers lines, and a worker whose model path says what it does."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import time
from typing import Any

from trouterd.child import Control, Refused

FORCE_GRACE = 0.2


async def run(control: Control) -> int:
    """The api or a worker, by the role's name."""
    return await (Api(control) if control.boot.role == "api" else Worker(control)).run()


class Api:
    """Each connection sends seconds and gets `done` after them; `error` when it is cut off."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.states: list[list[Any]] = []
        self.open: set[asyncio.Task[None]] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.threshold: Any = None
        control.handlers |= {"status": self.status, "drain": self.drain, "set": self.set, "abort": self.abort}
        control.on_peer_state(lambda s: self.states.append([s.name, s.state, s.epoch, s.process_state]))

    async def run(self) -> int:
        servers = []
        for fd in self.control.boot.listen_fds:
            listener = socket.socket(fileno=fd)
            start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
            servers.append(await start(self.connected, sock=listener))
        self.control.ready({"listeners": len(servers)})
        await self.control.closed
        for task in list(self.open):
            task.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)
        return 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        self.idle.clear()
        try:
            seconds = float(await reader.readline())
            writer.write(b"started\n")
            await asyncio.sleep(seconds)
            writer.write(b"done\n")
        except asyncio.CancelledError:
            writer.write(b"error\n")
        finally:
            writer.close()
            self.open.discard(task)
            if not self.open:
                self.idle.set()

    async def status(self, args: dict[str, Any]) -> dict[str, Any]:
        asked = await self.control.call("models")
        return {"states": self.states, "open": len(self.open), "models": [m["name"] for m in asked["models"]]}

    async def set(self, args: dict[str, Any]) -> None:
        return None

    async def abort(self, args: dict[str, Any]) -> dict[str, int]:
        raise Refused(f"no request has the id {args['id']!r}")

    async def drain(self, args: dict[str, Any]) -> dict[str, int]:
        try:
            async with asyncio.timeout(args["timeout"]):
                await self.idle.wait()
        except TimeoutError:
            return {"cut": len(self.open)}
        return {"cut": 0}


class Worker:
    """Model path: ok, fatal:WORDS, raise:WORDS, silent (never ready), native (holds the GIL), step (an endless step)."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.threshold = control.config.routes["r"].params["threshold"] if control.config.routes else None
        self.flushed = 0
        self.step_started = 0.0
        control.pong_stats = lambda: (7, time.monotonic() - self.step_started if self.step_started else 0.0)
        control.handlers |= {
            "status": self.status,
            "drain": self.drain,
            "set": self.set,
            "metrics": self.metrics,
            "flush-cache": self.flush,
        }

    async def run(self) -> int:
        path = self.control.config.models[self.control.boot.role].path.rpartition("/")[2]
        mode, _, words = path.partition(":")
        if mode == "fatal":
            self.control.fatal(words)
            return 78
        if mode == "raise":
            raise ValueError(words)
        if mode != "silent":
            self.control.ready({"context": 64})
        if mode == "step":
            self.step_started = time.monotonic()
        if mode == "native":
            await asyncio.sleep(0.05)  # the Ready frame goes out first
            ctypes.PyDLL(None).sleep(60)
        await self.control.closed
        return 0

    async def status(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"threshold": self.threshold, "config": self.control.config.server.drain_timeout}

    async def drain(self, args: dict[str, Any]) -> None:
        return None

    async def set(self, args: dict[str, Any]) -> None:
        if args["key"].startswith("routes.r.params."):
            if not 0 <= args["value"] <= 1:
                raise Refused("parameter 'threshold': expected float <= 1")
            self.threshold = args["value"]

    async def metrics(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        sample = {"suffix": "_total", "labels": {"model": self.control.boot.role}, "value": 7}
        return [{"name": "worker_steps", "help": "Forward passes.", "type": "counter", "samples": [sample]}]

    async def flush(self, args: dict[str, Any]) -> int:
        self.flushed += 1
        return self.flushed
