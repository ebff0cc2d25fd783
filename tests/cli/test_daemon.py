"""A daemon as a script's child: readiness, failure, draining."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from trouterd import ctl
from trouterd.cli import DEMO_CONFIG
from trouterd.daemon import Daemon, DaemonError
from trouterd.interpreter import environment


def test_ready_inside_and_gone_afterwards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The built-in pair, as `trouterd demo` starts it: out of the package, with no file but this one."""
    (tmp_path / "trouterd.toml").write_text(DEMO_CONFIG)
    with Daemon(["-c", str(tmp_path / "trouterd.toml")]) as daemon:
        assert ctl.main(["--control", str(tmp_path / "trouterd.ctl"), "status"]) == ctl.EXIT_OK
        assert "ready" in capfd.readouterr().out.splitlines()[0]
        pid = daemon.pid
    assert daemon.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "WARNING" not in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trouterd.toml"]


def test_it_ends_with_a_script_that_is_killed(tmp_path: Path) -> None:
    """Nobody else would end it, and its models would keep their memory."""
    (tmp_path / "trouterd.toml").write_text(DEMO_CONFIG)
    left = tmp_path / "left"  # by whoever is killed
    left.mkdir()
    lines = "import sys", "from trouterd.daemon import Daemon", "with Daemon(['-c', sys.argv[1]]) as daemon:"
    code = "\n".join((*lines, "    print(daemon.pid, flush=True)", "    input()"))
    command = [sys.executable, "-c", code, str(tmp_path / "trouterd.toml")]
    variables = environment(TMPDIR=str(left))
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=variables) as script:
        assert script.stdout is not None
        assert script.stderr is not None
        daemon = os.pidfd_open(int(script.stdout.readline()))
        script.kill()
        ended, _, _ = select.select([daemon], [], [], 50)
        if not ended:
            signal.pidfd_send_signal(daemon, signal.SIGTERM)
        os.close(daemon)
        assert ended
        assert f"the parent (pid {script.pid}) is gone: draining" in script.stderr.read()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left", "trouterd.toml"]


def test_daemon_that_cannot_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trouterd.toml").write_text("[server]\n")
    with pytest.raises(DaemonError, match="exited with code 78"), Daemon(["-c", str(tmp_path / "trouterd.toml")]):
        pass
    assert "no model is configured" in capfd.readouterr().err
