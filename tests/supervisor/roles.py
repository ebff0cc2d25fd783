"""Toy children for the real supervisor: an api that answers lines, and a worker whose model path says what it does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import time
from pathlib import Path
from typing import Any

from trouterd.calls import CallError
from trouterd.child import Control, Refused
from trouterd.memory import Claim, Footprint, Memory
from trouterd.worker.sizing import agree

FORCE_GRACE = 0.2


async def run(control: Control) -> int:
    """The api or a worker, by the role's name."""
    return await (Api(control) if control.boot.role == "api" else Worker(control)).run()


class Api:
    """Each connection sends a line and gets `started`, sends another one and gets `done`; `error` when it is cut off."""

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
            await reader.readline()
            writer.write(b"started\n")
            await reader.readline()
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
            return {"cut": len(self.open), "failed": 0}
        return {"cut": 0, "failed": 0}


class Worker:
    """Model path: ok, fatal:WORDS, raise:WORDS, silent (never ready), waits (for others, as it says, until a setting
    changes), native (holds the GIL), step (an endless step), or gpu:NAME=NUMBER,... for a model on a GPU (`sizes`)."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.threshold = control.config.routes["r"].params["threshold"] if control.config.routes else None
        self.flushed = 0
        self.step_started = 0.0
        self.told = asyncio.Event()
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
        detail: dict[str, Any] = {"context": 64}
        if mode == "gpu":
            try:
                detail |= await self.gpu(sizes(path))
            except Refused as error:
                self.control.fatal(str(error))
                return 78
            except CallError as error:
                self.control.last_words(str(error))
                return 1
        if mode == "waits":
            self.control.waits(True)
            await self.told.wait()
            self.control.waits(False)
        if mode != "silent":
            self.control.ready(detail)
        if mode == "step":
            self.step_started = time.monotonic()
        if mode == "native":
            await asyncio.sleep(0.05)  # the Ready frame goes out first
            ctypes.PyDLL(None).sleep(60)
        await self.control.closed
        return 0

    async def gpu(self, wanted: dict[str, float]) -> dict[str, Any]:
        """Take part in dividing the GPU of 1000 bytes, on which all models have loaded their weights."""
        models, folder = self.control.config.models, Path(self.control.config.server.socket).parent
        weights = sum(sizes(model.path)["weights"] for model in models.values() if "gpu:" in model.path)
        foreign = folder / "foreign"
        taken = weights + (int(foreign.read_text()) if foreign.exists() else 0)
        footprint = Footprint(
            weights=int(wanted["weights"]),
            graphs=int(wanted["graphs"]),
            workspace=int(wanted["workspace"]),
            kv_bytes_per_token=int(wanted["kv"]),
        )
        claim = Claim(footprint=footprint, page_size=1, context=int(wanted["context"]), most=1 << 20)
        if wanted["after"]:
            await self.end_of(int(wanted["after"]))
        if wanted["dies"] >= self.control.boot.epoch:
            os._exit(9)
        if wanted["dies_waiting"] >= self.control.boot.epoch:
            asyncio.get_running_loop().call_later(0.1, os._exit, 9)
        tokens = await agree(self.control, claim, lambda: {0: Memory(total=1000, free=int(1000 - taken))})
        environ = {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
        return {"kv_tokens": tokens, "environ": environ}

    async def end_of(self, epoch: int) -> None:
        """Wait until another one's process of this epoch has ended."""
        ended = asyncio.Event()
        self.control.on_peer_state(lambda s: ended.set() if s.state == "down" and s.epoch >= epoch else None)
        await ended.wait()

    async def status(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"threshold": self.threshold, "config": self.control.config.server.drain_timeout}

    async def drain(self, args: dict[str, Any]) -> None:
        return None

    async def set(self, args: dict[str, Any]) -> None:
        if args["key"].startswith("routes.r.params."):
            if not 0 <= args["value"] <= 1:
                raise Refused("parameter 'threshold': expected float <= 1")
            self.threshold = args["value"]
        self.told.set()

    async def metrics(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        sample = {"suffix": "_total", "labels": {"model": self.control.boot.role}, "value": 7}
        return [{"name": "worker_steps", "help": "Forward passes.", "type": "counter", "samples": [sample]}]

    async def flush(self, args: dict[str, Any]) -> int:
        self.flushed += 1
        return self.flushed


def sizes(path: str) -> dict[str, float]:
    """What a path such as gpu:weights=40,kv=2 says, with a default for all that it leaves out."""
    pairs = dict(pair.split("=") for pair in path.partition("gpu:")[2].split(",") if pair)
    names = ("weights", "graphs", "workspace", "after", "dies", "dies_waiting")
    return (
        dict.fromkeys(names, 0.0) | {"kv": 1.0, "context": 1.0} | {name: float(value) for name, value in pairs.items()}
    )
