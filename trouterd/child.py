"""The child's end of the control link, and `python -m trouterd.child`, the main function of every child process.

A role is a module with `async def run(control: Control) -> int`; what it returns is the exit code. Its life:

- the supervisor sends `Boot`; `run` starts, registers `control.handlers`, builds what it needs and calls `control.ready(...)`;
- verb `drain` (args: timeout in seconds): finish what runs, take nothing new, and return from the handler when done;
- end of file (`await control.closed`): return from `run` now. Whoever has not returned after `EXIT_GRACE` seconds is cancelled.

The link is served by the event loop, so a role that blocks its loop for longer than supervision.peer_stall counts as stalled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import uvloop

from trouterd import logs
from trouterd.calls import CallError as CallError
from trouterd.calls import OpenCalls, reply_to
from trouterd.calls import Refused as Refused
from trouterd.config import Config
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

EXIT_GRACE = 1.0
"""Seconds from the end of the control link to the cancellation of a role that did not return by itself; the supervisor may kill it
before."""
EXIT_CONFIG = 78
"""Exit code (EX_CONFIG of sysexits.h) of a child that reported `Fatal`."""

_PR_SET_PDEATHSIG = 1
log = logging.getLogger("trouterd.child")

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


async def _config_alone(args: dict[str, Any]) -> None:
    """`set` in a role without a handler: `Control.config` alone changes."""
    del args


class Control:
    """One child's link to the supervisor. All methods belong to the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, boot: Boot) -> None:
        self.boot = boot
        self.config: Config = boot.config
        """The configuration in force: `boot.config` with every later `set` applied. Replaced, never mutated."""
        self.handlers: dict[str, Handler] = {}
        """Verb -> coroutine function of the call's args. `set` gets key, value and the new `config` as a `Config`; it is
        called for every live key, and `config` above is replaced after it returned."""
        self.pong_stats: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        """Forward passes so far, and seconds of the one in progress (0 = none)."""
        self._reader = reader
        self._writer = writer
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls = OpenCalls()
        self._tasks: dict[asyncio.Task[Any], Call] = {}
        self._states: dict[str, PeerState] = {}
        self._state_callbacks: list[Callable[[PeerState], None]] = []
        self._serve_task = asyncio.create_task(self._serve())

    @classmethod
    async def open(cls, link: socket.socket) -> Control:
        """Take over a connected socket and wait for `Boot`.

        Raises:
            ControlError: the first frame is not `Boot`, or the link ended before it.
        """
        reader, writer = await asyncio.open_unix_connection(sock=link)
        boot = await read_frame(reader)
        if not isinstance(boot, Boot):
            writer.close()
            raise ControlError(f"expected Boot from the supervisor, got {type(boot).__name__}")
        return cls(reader, writer, boot)

    @property
    def closed(self) -> asyncio.Future[None]:
        """A future that is done at the end of the link; awaiting or cancelling it does not disturb other waiters."""
        return asyncio.shield(self._closed)

    def on_peer_state(self, callback: Callable[[PeerState], None]) -> None:
        """Call `callback` for the latest state of every process known so far and for each change from now on."""
        self._state_callbacks.append(callback)
        for state in self._states.values():
            callback(state)

    def ready(self, detail: dict[str, Any]) -> None:
        """Tell the supervisor that this process serves; `detail` appears in `trouterctl models`."""
        self._send(Ready(detail=detail))

    def fatal(self, message: str) -> None:
        """Tell the supervisor that no restart would help; it stops the daemon with this message. Then return from `run`."""
        self._send(Fatal(message=message))

    def last_words(self, line: str) -> None:
        """Leave one line that the supervisor quotes when it gives up on this process."""
        self._send(Call(id=0, verb="last-words", args={"line": line}))

    def waits(self, waits: bool) -> None:
        """Tell the supervisor whether this process, which starts, waits for others: supervision.start_timeout leaves that out."""
        self._send(Call(id=0, verb="waits", args={"waits": waits}))

    async def call(self, verb: str, args: dict[str, Any] | None = None) -> Any:
        """Ask the supervisor for a verb (status, metrics ...).

        Raises:
            Refused: the supervisor refused.
            CallError: it failed, or the link is closed.
        """
        if self._closed.done():
            raise CallError(f"{verb}: the supervisor is gone")
        return await self._calls.call(self._send, verb, args)

    async def aclose(self) -> None:
        """Flush what was sent and close the link."""
        self._serve_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serve_task
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def _send(self, frame: Frame) -> None:
        if not self._closed.done():
            self._writer.write(pack_frame(frame))

    async def _serve(self) -> None:
        try:
            while (frame := await read_frame(self._reader)) is not None:
                self._dispatch(frame)
        except ControlError as error:
            log.error("control link: %s", error)
        finally:
            self._closed.set_result(None)
            self._calls.fail("the supervisor is gone")

    def _dispatch(self, frame: Frame) -> None:
        match frame:
            case Ping(number=number):
                steps, seconds = self.pong_stats()
                self._send(Pong(number=number, steps=steps, step_seconds=seconds))
            case PeerState():
                self._states[frame.name] = frame
                for callback in self._state_callbacks:
                    callback(frame)
            case Reply():
                self._calls.settle(frame)
            case Call():
                task = asyncio.create_task(self._handle(frame))
                self._tasks[task] = frame
                task.add_done_callback(self._answer)
            case _:
                log.error("control link: unexpected %s", type(frame).__name__)

    async def _handle(self, call: Call) -> Any:
        handler = self.handlers.get(call.verb, _config_alone if call.verb == "set" else None)
        if handler is None:
            raise CallError(f"{self.boot.role} has no verb '{call.verb}'")
        if call.verb != "set":
            return await handler(call.args)
        config = msgspec.convert(call.args["config"], Config)
        result = await handler(call.args | {"config": config})
        self.config = config
        if call.args["key"] == "server.log_level":
            logs.set_level(config.server.log_level)
        return result

    def _answer(self, task: asyncio.Task[Any]) -> None:
        """Reply with a handler's outcome, whatever it is: a caller is never left waiting."""
        call = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Refused | CallError):
            log.error("verb %s failed", call.verb, exc_info=error)
        self._send(reply_to(call, task))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` (a pid, our parent) dies, also inside a blocking native call.

    Raises:
        SystemExit: the parent is gone already.
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call above, so no signal will come
        raise SystemExit(1)


async def _run_role(run: Coroutine[Any, Any, int], control: Control) -> int:
    """Run the role until it returns or the link ends; 0 if it had to be cancelled after the end of the link."""
    role = asyncio.ensure_future(run)
    either: list[asyncio.Future[Any]] = [role, control.closed]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not role.done():
        await asyncio.wait({role}, timeout=EXIT_GRACE)
    if not role.done():
        role.cancel()
        await asyncio.wait({role}, timeout=EXIT_GRACE)
    if not role.done() or role.cancelled():
        return 0
    return role.result()


async def _main(link: socket.socket, module: str) -> int:
    control = await Control.open(link)
    server = control.config.server
    logs.setup(control.boot.role, server.log_level, server.log_format)
    try:
        role = importlib.import_module(module)
        return await _run_role(role.run(control), control)
    except Exception as error:  # the main boundary: whatever it was, say it and exit non-zero
        log.critical("%s failed", control.boot.role, exc_info=error)
        control.last_words(f"{type(error).__name__}: {error}")
        return 1
    finally:
        await control.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Arguments are the supervisor's business: the control socket's descriptor, its own pid and the role's module."""
    parser = argparse.ArgumentParser(prog="trouterd.child")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--module", required=True)
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    # The supervisor alone decides about signals: it drains by verb and stops children by closing the link.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=options.control_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            code = runner.run(_main(link, options.module))
        except ControlError as error:
            log.critical("%s", error)
            code = 1
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not a normal interpreter exit: that one would wait for threads that sit in a native call.
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
