"""trouterctl: exit codes, output, and how little it imports."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trouterd import ctl
from trouterd.control import Call, Reply, pack_frame, receive_frame
from trouterd.interpreter import environment, module_command

FakeDaemon = Callable[[Reply | None], list[Call]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A control socket that gives one answer (None: hangs up); returns the list that its calls go to."""
    threads: list[threading.Thread] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "d.ctl"))
    listener.listen()
    listener.settimeout(10)
    monkeypatch.setenv("TROUTERD_CONTROL", str(tmp_path / "d.ctl"))

    def answer(reply: Reply | None) -> list[Call]:
        calls: list[Call] = []

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                call = receive_frame(link)
                assert isinstance(call, Call)
                calls.append(call)
                if reply is not None:
                    link.sendall(pack_frame(reply))

        thread = threading.Thread(target=serve)
        thread.start()
        threads.append(thread)
        return calls

    yield answer
    for thread in threads:
        thread.join()
    listener.close()


def test_set_prints_old_and_new(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake(Reply(id=1, result={"key": "server.drain_timeout", "old": 30.0, "new": 5.0, "pending": ["large"]}))
    assert ctl.main(["set", "server.drain_timeout", "5"]) == ctl.EXIT_OK
    assert (calls[0].verb, calls[0].args) == ("set", {"key": "server.drain_timeout", "value": "5"})
    assert capsys.readouterr().out == "server.drain_timeout: 30.0 -> 5.0\nnot answered yet by large\n"


def test_status_has_one_fact_a_line(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"model": "small", "tokens": 7, "loop_lag_seconds": 0.00034091099951183423, "handoff_us": {"p50": 2.0}}
    facts = {"version": "1", "state": "ready", "uptime_seconds": 1.0, "addresses": [], "processes": [], "rings": []}
    fake(Reply(id=1, result=facts | {"api": {"tokens_by_model": {}}, "workers": {"small": worker}}))
    assert ctl.main(["status"]) == ctl.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-7:]] == [
        ["api:"],
        ["tokens_by_model", "-"],
        [],
        ["small:"],
        ["tokens", "7"],
        ["loop_lag_seconds", "0.000"],
        ["handoff_us", "p50", "2.000"],
    ]


def test_json_is_the_answer_itself(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    fake(Reply(id=1, result={"aborted": 2}))
    assert ctl.main(["abort", "7", "--json"]) == ctl.EXIT_OK
    assert json.loads(capsys.readouterr().out) == {"aborted": 2}


def test_options_may_stand_before_the_verb(
    fake: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROUTERD_CONTROL", "/nowhere")
    calls = fake(Reply(id=1, result={"small": 3, "large": {"error": "large is down"}}))
    assert ctl.main(["--control", str(tmp_path / "d.ctl"), "flush-cache"]) == ctl.EXIT_OK
    assert calls[0].verb == "flush-cache"
    assert capsys.readouterr().out == "small: 3 pages freed\nlarge: large is down\n"


def test_refusal_and_failure_have_their_own_codes(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    fake(Reply(id=1, error="server.socket: not live", refused=True))
    assert ctl.main(["set", "server.socket", "x"]) == ctl.EXIT_REFUSED == 4
    assert capsys.readouterr().err == "trouterctl: server.socket: not live\n"
    fake(Reply(id=1, error="api is down"))
    assert ctl.main(["requests"]) == ctl.EXIT_FAILURE == 1
    fake(None)
    assert ctl.main(["status"]) == ctl.EXIT_FAILURE
    assert "closed the connection" in capsys.readouterr().err


def test_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["--control", str(tmp_path / "none"), "status"]) == ctl.EXIT_NO_DAEMON == 3
    assert "no daemon on" in capsys.readouterr().err
    monkeypatch.delenv("TROUTERD_CONTROL", raising=False)
    monkeypatch.chdir(tmp_path)
    assert ctl.main(["status"]) == ctl.EXIT_NO_DAEMON
    assert "which daemon?" in capsys.readouterr().err


def test_control_socket_of_the_configuration_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TROUTERD_CONTROL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trouterd.toml").write_text("[server]\nsocket = 'run/x.sock'\n")
    assert ctl.main(["status"]) == ctl.EXIT_NO_DAEMON
    assert f"no daemon on {tmp_path}/run/x.ctl" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["explode"], ["set", "one"], ["abort"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ctl.main(arguments)
    assert caught.value.code == ctl.EXIT_USAGE == 2
    assert "usage: trouterctl" in capsys.readouterr().err


def test_starts_without_heavy_imports() -> None:
    """What costs time: an event loop, HTTP, tensors, pretty printing."""
    code = "import sys, trouterd.ctl; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    command = [module_command("x")[0], "-c", code]
    loaded = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "aiohttp", "asyncio", "numpy", "rich", "transformers", "uvloop"} & set(loaded)
