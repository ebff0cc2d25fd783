"""trouterctl: exit codes, output, and how little it imports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trouterd import ctl, top
from trouterd.batching import command
from trouterd.control import Call, Reply, pack_frame, receive_frame
from trouterd.interpreter import environment, module_command

FakeDaemon = Callable[..., list[Call]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A control socket that gives these answers to one client (None: hangs up); returns the list that its calls go to."""
    threads: list[threading.Thread] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "d.ctl"))
    listener.listen()
    listener.settimeout(50)
    monkeypatch.setenv("TROUTERD_CONTROL", str(tmp_path / "d.ctl"))

    def answer(*replies: Reply | None) -> list[Call]:
        calls: list[Call] = []

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                for reply in replies:
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
    times = {"p50": 20.0, "p99": 270.944}
    worker = {"model": "small", "tokens": 7, "loop_lag_seconds": -0.00034091099951183423, "handoff_us": times}
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
        ["handoff_us", "p50", "20.0,", "p99", "271"],
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


def test_batching_changes_are_settings(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake(Reply(id=1, result={"key": "batching.mode", "old": "eager", "new": "auto", "pending": []}))
    assert ctl.main(["batching", "auto"]) == ctl.EXIT_OK
    assert (calls[0].verb, calls[0].args) == ("set", {"key": "batching.mode", "value": "auto"})
    assert capsys.readouterr().out == "batching.mode: eager -> auto\n"
    calls = fake(Reply(id=1, error="models.large.thresholds: 2 for 1 active requests", refused=True))
    assert ctl.main(["batching", "set", "large", "2,2"]) == ctl.EXIT_REFUSED
    assert calls[0].args == {"key": "models.large.thresholds", "value": [2, 2]}
    with pytest.raises(SystemExit):
        ctl.main(["batching", "set", "large", "1,0"])


def test_every_change_of_a_verb_is_printed(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    thresholds = {"key": "models.large.thresholds", "old": [], "new": [1, 2], "pending": []}
    mode = {"key": "batching.mode", "old": "auto", "new": "manual", "pending": []}
    fake(Reply(id=1, result=thresholds), Reply(id=1, result=mode))
    assert ctl.main(["batching", "set", "large", "1,2"]) == ctl.EXIT_OK
    assert capsys.readouterr().out == "models.large.thresholds: [] -> [1, 2]\nbatching.mode: auto -> manual\n"


def look(steps: int, tokens: int, now: float) -> dict[str, Any]:
    model = {"now": now, "mode": "auto", "threshold": 3, "thresholds": [1, 2, 3], "linger_ms": 56.0, "active": 4}
    model |= {"reasons": {"threshold": steps}, "queue": 0, "pending": 2, "tokens": tokens, "handoffs": tokens // 2}
    model |= {"since": 1.0, "steps": steps, "step_requests": steps * 2.5, "held_seconds": now / 4}
    group = {
        "models": ["small", "middle", "large"],
        "state": "settled",
        "active": 4.0,
        "measured": 150.0,
        "predicted": 160.0,
    }
    group |= {
        "ideal": 200.0,
        # No request has come to the middle one.
        "routing": {"small": [0.65, 0.35], "large": [1.0, 0.0]},
        "step_ms": {"small": 6.0, "large": 28.0},
        "contention": {"small": 0.0, "large": 0.35},
        "handoff_ms": 0.25,
        "trust": 0.97,
    }
    return {"models": {"small": model, "large": {"error": "large is down"}}, "controller": {"groups": [group]}}


def test_batching_show(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    fake(Reply(id=1, result=look(10, 100, 4.0)))
    assert ctl.main(["batching", "show"]) == ctl.EXIT_OK
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["MODEL", "MODE", "ACTIVE", "B", "LINGER", "MS", "LAUNCHES", "BY", "LIST"],
        ["small", "auto", "4", "3", "56.0", "threshold", "10", "1,2,3"],
        ["large:", "large", "is", "down"],
        [],
        ["small", ">", "middle", ">", "large:", "settled"],
        ["token/s:", "measured", "150.0,", "predicted", "160.0,", "ideal", "200.0", "at", "4.0", "active", "requests"],
        [
            "small:",
            "step",
            "6.00",
            "ms;",
            "goes",
            "on",
            "to",
            "small",
            "0.650,",
            "large",
            "0.350;",
            "contention",
            "0.00",
        ],
        [
            "large:",
            "step",
            "28.00",
            "ms;",
            "goes",
            "on",
            "to",
            "small",
            "1.000,",
            "large",
            "0.000;",
            "contention",
            "0.35",
        ],
        ["hand-off", "0.25", "ms;", "waiting", "has", "reached", "97%", "of", "what", "was", "promised"],
    ]


def test_what_is_not_known_yet_is_no_number(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = look(10, 100, 4.0), look(30, 200, 6.0)
    for view in before, after:
        view["controller"]["groups"][0] |= {"state": "learning", "predicted": 0.0, "ideal": 0.0}
    fake(Reply(id=1, result=before))
    assert ctl.main(["batching", "show"]) == ctl.EXIT_OK
    assert "measured 150.0, predicted -, ideal - at" in capsys.readouterr().out
    looks = iter([before, after])
    assert top.watch(argparse.Namespace(once=True, json=False, interval=0.05), lambda: next(looks)) == 0
    assert "150.0 token/s, predicted -, - of ideal; learning" in capsys.readouterr().out


def test_top_takes_rates_between_two_looks(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([look(10, 100, 4.0), look(30, 200, 6.0)] * 2)
    options = argparse.Namespace(once=True, json=False, interval=0.05)
    assert top.watch(options, lambda: next(looks)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["small", "2.5", "3", "4", "0", "2", "25%", "50.0", "25.0", "10.0"]
    assert lines[2] == ["large", "large", "is", "down"]
    assert lines[3][-4:] == ["75%", "of", "ideal;", "settled"]
    options.json = True
    assert top.watch(options, lambda: next(looks)) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["models"]["small"]["tokens_per_second"] == 50.0
    assert view["groups"][0]["of_ideal"] == 0.75
    restarted = look(50, 300, 9.0)
    restarted["models"]["small"]["since"] = 7.0
    assert top.rates(look(30, 200, 6.0), restarted)["models"]["small"] == {"error": "it has just been started"}


def test_show_without_an_api_says_so(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    fake(Reply(id=1, result=look(10, 100, 4.0) | {"controller": {"error": "api is down"}}))
    assert ctl.main(["batching", "show"]) == ctl.EXIT_OK
    assert capsys.readouterr().out.splitlines()[-1] == "controller: api is down"


def test_top_ends_quietly_with_its_reader(fake: FakeDaemon, tmp_path: Path) -> None:
    fake(Reply(id=1, result=look(1, 100, 1.0)), Reply(id=1, result=look(2, 100, 2.0)))
    arguments = [*module_command("trouterd.ctl", "--control", str(tmp_path / "d.ctl"), "top", "--interval", "0.05")]
    reader, writer = os.pipe()
    process = subprocess.Popen(arguments, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.close(reader)
    _, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (ctl.EXIT_OK, "")


def test_top_says_when_the_daemon_is_gone(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    fake(Reply(id=1, result=look(1, 100, 1.0)), Reply(id=1, result=look(2, 100, 2.0)), None)
    assert ctl.main(["top", "--interval", "0.05"]) == ctl.EXIT_FAILURE
    assert capsys.readouterr().err == "trouterctl: the daemon did not answer: it closed the connection\n"


@pytest.mark.parametrize(("arguments", "code"), [(["top"], ctl.EXIT_OK), (["drain"], ctl.EXIT_FAILURE)])
def test_an_interrupt_is_no_traceback(
    fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    fake()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ctl, "_ask", interrupted)
    assert ctl.main(arguments) == code


def test_an_interrupted_plan_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "survey", interrupted)
    plan = ["batching", "plan", "--p", "0.35", "--latency-ms", "6,28", "--concurrency", "4"]
    assert ctl.main(plan) == ctl.EXIT_FAILURE


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_top_on_a_small_terminal(fake: FakeDaemon, tmp_path: Path, term: str) -> None:
    """Nothing is wrapped; one that cannot be redrawn gets lines."""
    fake(Reply(id=1, result=look(1, 100, 1.0)), Reply(id=1, result=look(2, 100, 2.0)), None)
    arguments = [*module_command("trouterd.ctl", "--control", str(tmp_path / "d.ctl"), "top", "--interval", "0.05")]
    ours, theirs = pty.openpty()
    small = environment(TERM=term, COLUMNS="12", LINES="3")
    process = subprocess.Popen(arguments, env=small, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    _, errors = process.communicate(timeout=50)
    assert errors == "trouterctl: the daemon did not answer: it closed the connection\n"
    assert (b"TOKEN/S" in shown) == (term == "dumb")
    assert b"small  2.5" in shown
