"""How benchmarks end."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import uvloop

from bench import end_at_once
from bench.command_line import run_command, whole_numbers
from bench.endpoint import EndpointError
from trouterd.daemon import DaemonError
from trouterd.interpreter import environment, module_command

BENCHES = sorted(
    path for path in Path(__file__).parents[2].joinpath("bench").glob("*.py") if "ArgumentParser(" in path.read_text()
)
RUN_BY_OTHERS = ("experiment_arguments", "step_arguments")
"""Command lines of `bench.throughput` and `bench.step`."""


async def _waiting() -> None:
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()


def _in_an_event_loop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_waiting())


@pytest.mark.parametrize("wait", [lambda: os.kill(os.getpid(), signal.SIGTERM), _in_an_event_loop])
def test_sigterm_ends_what_was_started(wait: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ended = []

    def main() -> int:
        try:
            wait()
        finally:
            ended.append(True)
        return 0

    with pytest.raises(SystemExit) as left:
        run_command("bench.waiting", main)
    assert left.value.code == 128 + signal.SIGTERM
    assert ended == [True]
    assert capsys.readouterr().err == "bench.waiting: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("code", [0, 1, None])
def test_codes(code: int | None) -> None:
    with pytest.raises(SystemExit) as left:
        run_command("bench.done", lambda: code)
    assert left.value.code == code


def test_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        run_command("bench.waiting", main)
    assert left.value.code == 130
    assert capsys.readouterr().err == "bench.waiting: ended by SIGINT\n"


@pytest.mark.parametrize("name", ["throughput", "ipc", "frontier"])
def test_ctrl_c_while_it_imports(tmp_path: Path, name: str) -> None:
    # What all of them import, sooner or later; here it never comes to an end.
    (tmp_path / "msgspec.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(1000)\n")
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    process = subprocess.Popen(
        module_command(f"bench.{name}"),
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests may run in the background, where Ctrl-C is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"bench: ended by SIGINT\n")


def test_ctrl_c_is_an_exception_from_then_on() -> None:
    before = signal.signal(signal.SIGINT, end_at_once)
    try:
        with pytest.raises(SystemExit) as left:
            run_command("bench.begun", lambda: int(signal.getsignal(signal.SIGINT) is not signal.default_int_handler))
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 0


def test_whoever_imports_the_package_keeps_ctrl_c() -> None:
    code = "import signal; before = signal.getsignal(signal.SIGINT); import bench; assert signal.getsignal(signal.SIGINT) is before"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=60)


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_every_benchmark_ends_so(path: Path) -> None:
    assert ("    run_command(" in path.read_text()) is (path.stem not in RUN_BY_OTHERS)


@pytest.mark.parametrize(
    "error",
    [
        DaemonError("the daemon exited with code 78 before it was ready"),
        EndpointError("unix:api.sock", "POST /v1/completions: the request was aborted by the operator"),
    ],
)
def test_what_a_daemon_does_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as left:
        run_command("bench.served", main)
    assert left.value.code == 1
    assert capsys.readouterr().err == f"bench.served: {error}\n"


def test_whole_numbers() -> None:
    assert whole_numbers("1, 16,4") == (1, 16, 4)
    for text in ("", "0", "1,", "x", "-1", "1.5", "1,²"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number from 1 on, got"):
            whole_numbers(text)
