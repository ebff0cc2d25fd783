"""A whole trouterd in its own processes, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.models.tiny import byte_tokenizer

SMALL = b"abcdefghijklmnopqrstuvwxyz"
LARGE = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
START_TIMEOUT = 120.0


@dataclass
class Instance:
    """A running daemon, its log, and its HTTP and control interfaces."""

    process: asyncio.subprocess.Process
    socket: Path
    control: Path
    lines: list[str] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def session(self, *, force_close: bool = False) -> aiohttp.ClientSession:
        """HTTP over the unix socket; `force_close`: a connection of its own for every request."""
        connector = aiohttp.UnixConnector(str(self.socket), limit=0, force_close=force_close)
        return aiohttp.ClientSession(connector=connector, base_url="http://trouterd")

    async def ctl(self, *arguments: str) -> Any:
        """What trouterctl --json prints."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trouterd.ctl", "--control", str(self.control), "--json", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return json.loads(output)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """The workers' part of the status, when none of them misses the time that it gets to answer."""
        async with asyncio.timeout(30):
            while True:
                workers: dict[str, dict[str, Any]] = (await self.ctl("status"))["workers"]
                if not any("error" in answer for answer in workers.values()):
                    return workers

    async def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return {p["name"]: p["pid"] for p in (await self.ctl("status"))["processes"]}

    async def kill(self, name: str) -> None:
        """SIGKILL one child and wait until the next of its name runs."""
        pid = (await self.pids())[name]
        assert pid > 0, f"{name} is not running"
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(START_TIMEOUT):
            while (await self.pids())[name] in (0, pid):
                await asyncio.sleep(0.05)

    async def logged(self, *words: str, after: int = 0) -> str:
        """The first line from number `after` on that has all the words; waits for it."""
        async with asyncio.timeout(30):
            while True:
                for line in self.lines[after:]:
                    if all(word in line for word in words):
                        return line
                self.grown.clear()
                await self.grown.wait()

    async def ready(self) -> None:
        """Wait for GET /ready to answer 200."""
        async with asyncio.timeout(START_TIMEOUT), self.session() as session:
            while self.process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get("/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)
        raise AssertionError("\n".join(self.lines))

    async def idle(self) -> dict[str, Any]:
        """Wait until no worker holds a request; the workers' part of the status, pages balanced."""
        async with asyncio.timeout(30):
            while True:
                workers = await self.workers()
                busy = ("requests_running", "requests_waiting", "requests_pending", "requests_away")
                if not any(w[key] for w in workers.values() for key in busy):
                    assert all(w["pages_owned"] == 0 for w in workers.values()), workers
                    return workers
                await asyncio.sleep(0.05)

    async def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


def scripts(folder: Path, *, delay_ms: float = 0.0, large_delay_ms: float | None = None, **sections: str) -> str:
    """Configuration of two scripted models ('small' writes a-z, 'large' A-Z) and the routes over them."""
    tokenizer = byte_tokenizer(folder / "tokenizer", template_bos=False, add_bos=False)
    lines = []
    for name, ids, delay in (("small", SMALL, delay_ms), ("large", LARGE, large_delay_ms)):
        script = {"vocab_size": 258, "eos": 257, "ids": list(ids), "cycle": True}
        script["delay_ms"] = delay_ms if delay is None else delay
        (folder / f"{name}.json").write_text(json.dumps(script))
        lines += [f"[models.{name}]", f'path = "{name}.json"', 'format = "script"', f'tokenizer = "{tokenizer}"']
    lines += [
        "[routes.demo]",
        'models = ["small", "large"]',
        'algorithm = "every_n"',
        'params = { shape = "visit", n = 4 }',
        "[routes.strict]",
        'models = ["small", "large"]',
        'algorithm = "every_n"',
        'params = { shape = "visit", n = 4 }',
        'on_peer_loss = "fail"',
    ]
    for name, text in sections.items():
        lines += [f"[{name}]", text]
    return "\n".join(lines) + "\n"


def expected(count: int, *, n: int = 4) -> str:
    """The text that route 'demo' writes: every n-th letter by the large model."""
    return "".join(chr((LARGE if (t + 1) % n == 0 else SMALL)[t % 26]) for t in range(count))


async def _collect(instance: Instance) -> None:
    stream = instance.process.stderr
    assert stream is not None
    while line := await stream.readline():
        instance.lines.append(line.decode(errors="replace").rstrip())
        instance.grown.set()


async def launch(folder: Path, config: str, *flags: str) -> Instance:
    """Start a daemon without waiting for it."""
    file = folder / "trouterd.toml"
    file.write_text(config)
    socket, control = folder / "api.sock", folder / "api.ctl"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trouterd.cli", "serve", "-c", str(file)),
        *("--socket", str(socket), "--control", str(control), *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    return Instance(process, socket, control)


@contextlib.asynccontextmanager
async def serving(folder: Path, config: str, *flags: str) -> AsyncIterator[Instance]:
    """A daemon that is ready; ended, by force if need be, when the block is left."""
    instance = await launch(folder, config, *flags)
    reader = asyncio.create_task(_collect(instance))
    try:
        await instance.ready()
        yield instance
    finally:
        if instance.process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    await instance.stop()
        if instance.process.returncode is None:
            instance.process.kill()
            await instance.process.wait()
        await reader


async def complete(session: aiohttp.ClientSession, model: str = "demo", **fields: Any) -> tuple[int, dict[str, Any]]:
    """One completion without streaming: status and body."""
    body = {"model": model, "prompt": "x", "max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields
    async with session.post("/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


@dataclass
class Streamed:
    """What a streaming client saw."""

    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    usage: dict[str, Any] | None = None


async def stream(
    session: aiohttp.ClientSession,
    model: str = "demo",
    *,
    stop_after: int | None = None,
    begun: asyncio.Event | None = None,
    **fields: Any,
) -> Streamed:
    """One streamed completion, to its end or until `stop_after` characters have come (then the client goes away).

    `begun`: set when the first ones have.
    """
    body = {"model": model, "prompt": "x", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | fields
    seen = Streamed()
    async with session.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            seen.error = (await answer.json())["error"]
            return seen
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                seen.done = True
                break
            event = json.loads(line[6:])
            seen.error = event.get("error") or seen.error
            seen.usage = event.get("usage") or seen.usage
            for choice in event.get("choices", []):
                seen.text += choice["text"]
                seen.finish = choice["finish_reason"] or seen.finish
            if begun is not None and seen.text:
                begun.set()
            if stop_after is not None and len(seen.text) >= stop_after:
                answer.close()
                break
    return seen


def alive(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return fields[0] not in "ZX"


async def gone(pids: Iterable[int]) -> None:
    """Wait for the end of all processes."""
    async with asyncio.timeout(30):
        while any(map(alive, pids)):
            await asyncio.sleep(0.02)


def shared_segments(daemon: Instance) -> list[str]:
    """Names in shared memory that a daemon has made; those of other tests come and go."""
    return [path.name for path in Path("/dev/shm").glob(f"trouterd-*-{daemon.process.pid}-*")]  # noqa: S108
