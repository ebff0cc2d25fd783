"""The service manager's protocols: readiness, watchdog, inherited sockets."""

from __future__ import annotations

import configparser
import os
import shlex
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervisor.conftest import Start
from tests.supervisor.daemon import PATIENCE, finish, toy_config
from trouterd import cli
from trouterd.supervisor.systemd import InheritedSockets, Notifier

PACKAGING = Path(__file__).parents[2] / "packaging"

# Runs a command as a service manager does: descriptors from 3 on, LISTEN_PID its own pid.
ACTIVATE = """
import os, sys
fds = [int(fd) for fd in sys.argv[1].split(",")]
for number, fd in enumerate([os.dup(fd) for fd in fds]):
    os.dup2(fd, 3 + number)
    os.set_inheritable(3 + number, True)
os.environ |= {"LISTEN_FDS": str(len(fds)), "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": sys.argv[2]}
os.execv(sys.argv[3], sys.argv[3:])
"""


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two listening unix sockets as another process opened them."""
    config = toy_config(tmp_path)
    sockets = []
    for path in (config.server.socket, config.server.control):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        listener.set_inheritable(True)
        sockets.append(listener)
    yield sockets[0], sockets[1]
    for listener in sockets:
        listener.close()


def test_inherited_sockets_are_served_and_kept(
    start: Start, tmp_path: Path, listeners: tuple[socket.socket, socket.socket]
) -> None:
    fds = ",".join(str(listener.fileno()) for listener in listeners)

    def activate(command: list[str]) -> list[str]:
        return [sys.executable, "-c", ACTIVATE, fds, "http:control", *command]

    daemon = start(options={"launcher": activate}).wait_ready()
    assert daemon.status()["addresses"] == [f"unix:{daemon.config.server.socket}"]
    assert finish(daemon.open_request()) == b"done\n"
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    for path in (daemon.config.server.socket, daemon.config.server.control):
        assert stat.S_ISSOCK(Path(path).stat().st_mode), "the manager's sockets are not ours to remove"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(daemon.config.server.socket)


def test_watchdog_is_fed_while_workers_make_progress(start: Start) -> None:
    daemon = start(options={"WATCHDOG_USEC": "300000"}).wait_ready()
    daemon.lines.clear()
    daemon.wait_for(lambda: daemon.notifications().count("WATCHDOG=1") >= 3, "signs of life")


def test_no_sign_of_life_where_none_is_wanted(start: Start) -> None:
    daemon = start().wait_ready()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    daemon.notifications()
    assert "WATCHDOG=1" not in daemon.lines
    assert "STOPPING=1" in daemon.lines


def test_manager_that_is_gone_is_mentioned_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notifier.send("READY=1")
    notifier.send("WATCHDOG=1")
    notifier.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot notify the service manager at '{tmp_path}/gone': [Errno 2] No such file or directory"
    ]


def test_notification_reaches_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0trouterd-test-{os.getpid()}")
        manager.settimeout(PATIENCE)
        environ = {"NOTIFY_SOCKET": f"@trouterd-test-{os.getpid()}"}
        notifier = Notifier(environ)
        notifier.send("READY=1", "STATUS=here")
        assert manager.recv(100) == b"READY=1\nSTATUS=here"
        notifier.close()
    assert environ == {}, "children do not inherit it"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_watchdog_interval(environ: dict[str, str], seconds: float) -> None:
    assert Notifier(environ).watchdog_seconds == seconds


def test_inherited_descriptor_that_is_no_socket(start: Start) -> None:
    def activate(command: list[str]) -> list[str]:
        return [sys.executable, "-c", ACTIVATE, "0", "http", *command]

    daemon = start(options={"launcher": activate})
    assert daemon.wait() == 1
    assert "LISTEN_FDS: descriptor 3 is no socket" in daemon.log


@pytest.mark.parametrize(
    "environ", [{}, {"LISTEN_FDS": "2", "LISTEN_PID": "1"}, {"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())}]
)
def test_sockets_meant_for_others_are_not_taken(environ: dict[str, str]) -> None:
    inherited = InheritedSockets(environ)
    assert inherited.api == []
    assert inherited.control is None
    assert environ == {}


def test_unit_leaves_gpus_and_their_compilers_what_they_need() -> None:
    lines = (PACKAGING / "trouterd.service").read_text().splitlines()
    settings = [line.partition("=")[::2] for line in lines if "=" in line and not line.startswith("#")]
    names = {name for name, _ in settings}
    assert not names & {"PrivateDevices", "DevicePolicy", "DeviceAllow", "MemoryDenyWriteExecute", "ProcSubset"}
    assert "AF_NETLINK" in dict(settings)["RestrictAddressFamilies"]
    variables = dict(value.partition("=")[::2] for name, value in settings if name == "Environment")
    home = "%C/" + dict(settings)["CacheDirectory"]
    caches = (
        "XDG_CACHE_HOME",
        "CUDA_CACHE_PATH",
        "FLASHINFER_WORKSPACE_BASE",
        "TRITON_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
    )
    assert all(variables[name].startswith(home) for name in caches)


def test_units_agree_with_each_other_and_with_the_command_line(tmp_path: Path) -> None:
    units = {}
    for suffix in ("service", "socket"):
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(PACKAGING / f"trouterd.{suffix}")
        units[suffix] = unit
    program, *arguments = shlex.split(units["service"]["Service"]["ExecStart"])
    assert Path(program).name == "trouterd"
    options = cli._parser().parse_args(arguments)
    folder = Path("/run", units["service"]["Service"]["RuntimeDirectory"])
    assert options.socket == units["socket"]["Socket"]["ListenStream"] == str(folder / "trouterd.sock")
    options.config = tmp_path / "trouterd.toml"
    options.config.write_text('[models.small]\npath = "builtin:small"\n')
    assert cli._load(options, check=False).server.control == str(folder / "trouterd.ctl")
