"""A supervisor under test: its process, its notifications, its control socket and its log."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ipc.sweep import SHM_FOLDER
from trouterd.config import Config, Model, Route, Server, Supervision
from trouterd.control import Call, Reply, pack_frame, receive_frame
from trouterd.interpreter import environment, module_command

PATIENCE = 50.0
"""Seconds after which a test gives up waiting; not a measure of speed."""


def toy_config(folder: Path, **models: str) -> Config:
    """Workers by name and mode; the route `r` has one threshold. Nobody stalls for being slow: see `stalls`."""
    models = models or {"small": "ok"}
    return Config(
        server=Server(socket=str(folder / "api.sock"), control=str(folder / "api.ctl")),
        supervision=Supervision(heartbeat_interval=0.05, peer_stall=PATIENCE, restart_backoff=0.05),
        models={name: Model(path=mode) for name, mode in models.items()},
        routes={"r": Route(models=list(models), params={"threshold": 0.3})},
    )


def stalls(config: Config) -> Config:
    """The same for a test that waits until a child counts as stalled."""
    supervision = msgspec.structs.replace(config.supervision, peer_stall=0.5)
    return msgspec.structs.replace(config, supervision=supervision)


def gpu_config(folder: Path, **models: str) -> Config:
    """Workers on GPU 0 by name and sizes (`roles.sizes`)."""
    config = toy_config(folder, **{name: f"gpu:{sizes}" for name, sizes in models.items()})
    on_gpu = {name: msgspec.structs.replace(model, device="cuda:0") for name, model in config.models.items()}
    return msgspec.structs.replace(config, models=on_gpu)


class Daemon:
    """Started at once; `wait_ready` returns when it says READY=1. Ended, if need be, at `close`.

    `scrape`: seconds that children get to answer for the status and for changes; short for a test in which one never does.
    `forced`: seconds that workers get to end at once.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        launcher: Callable[[list[str]], list[str]] = list,
        scrape: float = PATIENCE,
        forced: float = 10.0,
        **env: str,
    ):
        self.config = config
        self.file = folder / "config.json"
        self.file.write_bytes(msgspec.json.encode(config))
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / "notify"
        address.unlink(missing_ok=True)
        self.notify.bind(str(address))
        self.notify.setblocking(False)
        self.lines: list[str] = []
        self.log_file = folder / "log"
        self.log_file.touch()
        command = launcher(module_command("tests.supervisor.host", str(self.file), str(scrape), str(forced)))
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, stderr=log, env=environment(NOTIFY_SOCKET=str(address), **env), close_fds=False
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def notifications(self) -> list[str]:
        """All lines so far; reads what is there."""
        try:
            while True:
                self.lines += self.notify.recv(4096).decode().split("\n")
        except BlockingIOError:
            return self.lines

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of a condition."""
        deadline = time.monotonic() + PATIENCE
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"never happened: {what}\n{self.log}")
            select.select([self.notify], [], [], 0.05)  # waits a little for news
            self.notifications()
        return value

    def wait_ready(self) -> Daemon:
        self.wait_for(lambda: "READY=1" in self.notifications() or self.process.poll() is not None, "READY=1")
        assert self.process.poll() is None, self.log
        return self

    def wait_log(self, words: str) -> str:
        """The first log line with these words."""
        line: str = self.wait_for(
            lambda: next((line for line in self.log.splitlines() if words in line), ""), f"log line '{words}'"
        )
        return line

    def ask(self, verb: str, **args: Any) -> Reply:
        """One call on the control socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(PATIENCE)
            link.connect(self.config.server.control)
            link.sendall(pack_frame(Call(id=9, verb=verb, args=args)))
            reply = receive_frame(link)
        assert isinstance(reply, Reply)
        assert reply.id == 9
        return reply

    def status(self) -> dict[str, Any]:
        result: dict[str, Any] = self.ask("status").result
        return result

    def child(self, name: str) -> dict[str, Any]:
        """The supervisor's report on one child."""
        return next(process for process in self.status()["processes"] if process["name"] == name)

    def model(self, name: str) -> dict[str, Any]:
        """What a worker said of itself when it became ready."""
        return next(model for model in self.ask("models").result["models"] if model["name"] == name)

    def child_pids(self) -> list[int]:
        return [process["pid"] for process in self.status()["processes"]]

    def open_request(self) -> socket.socket:
        """A request that the toy api has started to answer; it does until `finish`."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(PATIENCE)
        link.connect(self.config.server.socket)
        link.sendall(b"begin\n")
        with link.makefile("rb", buffering=0) as lines:
            assert lines.readline() == b"started\n"
        return link

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.notify.close()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def finish(link: socket.socket) -> bytes:
    """Let a request end; what it got after `started`."""
    link.sendall(b"end\n")
    return rest(link)


def rest(link: socket.socket) -> bytes:
    """What a request gets after `started`."""
    with link:
        data = b""
        while piece := link.recv(64):
            data += piece
        return data


def segments(pid: int) -> list[str]:
    """Names in shared memory that the daemon with this process id has made; those of other tests come and go."""
    return [path.name for path in SHM_FOLDER.glob(f"trouterd-*-{pid}-*")]
