"""The child's end of the control link."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from trouterd.child import CallError, Control, Refused
from trouterd.config import Config
from trouterd.control import (
    Boot,
    Call,
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
from trouterd.settings import set_value

CONFIG = Config()


class Parent:
    """The supervisor's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, theirs: socket.socket) -> None:
        self.reader = reader
        self.writer = writer
        self.theirs = theirs

    def send(self, frame: Frame) -> None:
        self.writer.write(pack_frame(frame))

    async def ask(self, frame: Frame) -> Frame | None:
        self.send(frame)
        return await read_frame(self.reader)


@pytest.fixture
async def parent() -> AsyncIterator[Parent]:
    ours, theirs = socket.socketpair()
    parent = Parent(*await asyncio.open_unix_connection(sock=ours), theirs)
    yield parent
    parent.writer.close()
    await parent.writer.wait_closed()


@pytest.fixture
async def control(parent: Parent) -> AsyncIterator[Control]:
    parent.send(Boot("small", 1, CONFIG, [], []))
    control = await Control.open(parent.theirs)
    yield control
    await control.aclose()


async def test_ping_is_answered_with_progress(parent: Parent, control: Control) -> None:
    assert await parent.ask(Ping(number=3)) == Pong(3, 0, 0.0)
    control.pong_stats = lambda: (5, 0.25)
    assert await parent.ask(Ping(number=4)) == Pong(4, 5, 0.25)


async def test_every_outcome_of_a_handler_is_a_reply(
    parent: Parent, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    async def echo(args: dict[str, Any]) -> Any:
        return args["x"]

    async def refuse(args: dict[str, Any]) -> Any:
        raise Refused("out of range")

    async def stop(args: dict[str, Any]) -> Any:
        raise asyncio.CancelledError

    control.handlers |= {"echo": echo, "refuse": refuse, "stop": stop}
    assert await parent.ask(Call(1, "echo", {"x": [1]})) == Reply(1, [1])
    assert await parent.ask(Call(2, "refuse")) == Reply(2, None, "out of range", True)
    assert await parent.ask(Call(3, "nothing")) == Reply(3, None, "small has no verb 'nothing'")
    assert await parent.ask(Call(4, "stop")) == Reply(4, None, "cancelled")
    assert caplog.records == []
    assert await parent.ask(Call(5, "echo", {})) == Reply(5, None, "'x'")
    assert "verb echo failed" in caplog.text


async def test_calls_to_the_supervisor(parent: Parent, control: Control) -> None:
    asked = [asyncio.create_task(control.call(verb, {"v": verb})) for verb in ("a", "b", "c")]
    calls = [await read_frame(parent.reader) for _ in asked]
    first, second, third = (call for call in calls if isinstance(call, Call))
    parent.send(Reply(third.id, error="broken"))
    parent.send(Reply(second.id, error="no", refused=True))
    parent.send(Reply(first.id, result=1))
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert results[0] == 1
    assert isinstance(results[1], Refused)
    assert isinstance(results[2], CallError)
    assert str(results[2]) == "broken"


async def test_states_before_and_after_registration(parent: Parent, control: Control) -> None:
    parent.send(PeerState("large", "up", 1))
    parent.send(PeerState("large", "down", 1))
    await parent.ask(Ping(number=1))
    seen: list[tuple[str, int]] = []
    control.on_peer_state(lambda state: seen.append((state.state, state.epoch)))
    parent.send(PeerState("large", "up", 2))
    await parent.ask(Ping(number=2))
    assert seen == [("down", 1), ("up", 2)]


async def test_set_replaces_the_configuration_unless_refused(parent: Parent, control: Control) -> None:
    changed, _, value = set_value(CONFIG, "server.drain_timeout", 2.0)
    args = {"key": "server.drain_timeout", "value": value, "config": msgspec.to_builtins(changed)}
    assert await parent.ask(Call(1, "set", args)) == Reply(1)
    assert control.config == changed
    assert control.boot.config == CONFIG

    async def refuse(args: dict[str, Any]) -> None:
        assert args["config"].server.drain_timeout == 3.0
        raise Refused("no")

    control.handlers["set"] = refuse
    again, _, value = set_value(changed, "server.drain_timeout", 3.0)
    reply = await parent.ask(Call(2, "set", args | {"value": value, "config": msgspec.to_builtins(again)}))
    assert reply == Reply(2, None, "no", True)
    assert control.config == changed


async def test_what_it_says_on_its_own(parent: Parent, control: Control) -> None:
    control.ready({"context": 8})
    control.fatal("no weights")
    control.last_words("ValueError: x")
    assert [await read_frame(parent.reader) for _ in range(3)] == [
        Ready({"context": 8}),
        Fatal("no weights"),
        Call(0, "last-words", {"line": "ValueError: x"}),
    ]


async def test_end_of_the_link(parent: Parent, control: Control) -> None:
    waiting = asyncio.create_task(control.call("status"))
    cancelled = control.closed
    cancelled.cancel()
    await read_frame(parent.reader)
    parent.writer.close()
    await control.closed
    with pytest.raises(CallError, match="supervisor is gone"):
        await waiting
    with pytest.raises(CallError, match="supervisor is gone"):
        await control.call("status")
    control.ready({})  # nobody hears it, and nothing breaks


def spawn(module: str, code: str, folder: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A child process whose role is the given code."""
    (folder / f"{module}.py").write_text(code)
    ours, theirs = socket.socketpair()
    with theirs:
        options = ["--control-fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--module", module]
        process = subprocess.Popen(
            module_command("trouterd.child", *options),
            pass_fds=[theirs.fileno()],
            env=environment() | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        )
    ours.sendall(pack_frame(Boot("small", 1, CONFIG, [], [])))
    return process, ours


def test_role_that_ignores_the_end_is_ended(tmp_path: Any) -> None:
    code = "import asyncio\nasync def run(control):\n    control.ready({})\n    await asyncio.sleep(1000)\n"
    process, link = spawn("stubborn", code, tmp_path)
    with link:
        assert link.recv(4) != b""
    assert process.wait(50) == 0


def test_threads_in_native_calls_do_not_hold_up_the_exit(tmp_path: Any) -> None:
    code = (
        "import asyncio, time\n"
        "async def run(control):\n"
        "    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)\n"
        "    return 5\n"
    )
    process, link = spawn("sleeper", code, tmp_path)
    with link:
        assert process.wait(50) == 5


def test_child_without_its_parent_ends(tmp_path: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        options = ["--control-fd", str(theirs.fileno()), "--parent", "1", "--module", "none"]
        command = module_command("trouterd.child", *options)
        assert subprocess.run(command, pass_fds=[theirs.fileno()], env=environment(), check=False).returncode == 1
