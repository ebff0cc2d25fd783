"""trouterd's commands, each in a process of its own as users run it."""

from __future__ import annotations

import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from trouterd import __version__, cli
from trouterd.interpreter import environment, module_command


def trouterd(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        module_command("trouterd.cli", *arguments),
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )


def test_config_prints_a_file_that_loads(tmp_path: Path) -> None:
    (tmp_path / "trouterd.toml").write_text(cli.DEMO_CONFIG)
    done = trouterd("config", "--set", "models.small.threads=3", cwd=tmp_path, TROUTERD_SERVER__DRAIN_TIMEOUT="7")
    assert done.returncode == 0, done.stderr
    tree = tomllib.loads(done.stdout)
    assert tree["models"]["small"]["threads"] == 3
    assert tree["server"]["drain_timeout"] == 7
    assert tree["server"]["socket"] == str(tmp_path / "trouterd.sock")


@pytest.mark.parametrize("command", ["serve", "check", "config"])
def test_mistakes_in_the_configuration_exit_78(tmp_path: Path, command: str) -> None:
    (tmp_path / "trouterd.toml").write_text(cli.DEMO_CONFIG + "[server]\nsockte = 'x'\n[rings]\nspin_us = -1\n")
    done = trouterd(command, cwd=tmp_path)
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "trouterd: trouterd.toml: server.sockte: unknown key; did you mean 'socket'?",
        "trouterd: trouterd.toml: rings.spin_us: expected int >= 0, got -1",
    ]


def test_no_configuration(tmp_path: Path) -> None:
    done = trouterd("serve", cwd=tmp_path)
    assert done.returncode == 78
    assert f"no trouterd.toml in {tmp_path}" in done.stderr


def test_socket_in_use_is_a_temporary_failure(tmp_path: Path) -> None:
    import socket

    (tmp_path / "trouterd.toml").write_text(cli.DEMO_CONFIG)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "trouterd.sock"))
        other.listen()
        done = trouterd("serve", cwd=tmp_path)
    assert done.returncode == 75
    assert "trouterd.sock is in use: another process answers on it" in done.stderr


@pytest.fixture
def heard() -> Iterator[None]:
    """What is started hears Ctrl-C, also where these tests are a shell's background job, which does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_before_anything_is_opened(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "config")
    command = module_command("trouterd.cli", "serve", "-c", str(tmp_path / "config"))
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as daemon:
        with (tmp_path / "config").open("w"):  # returns when the daemon reads it
            daemon.send_signal(number)
        # The end of the file: a signal that came just before the daemon waited for it did not wake it.
        _, complaint = daemon.communicate()
    assert (daemon.returncode, complaint) == (0, "")


def test_version_and_usage(tmp_path: Path) -> None:
    assert trouterd("version", cwd=tmp_path).stdout == f"trouterd {__version__}\n"
    assert trouterd("servo", cwd=tmp_path).returncode == 2
    done = trouterd("serve", "--set", "server.socket", "-c", "x", cwd=tmp_path)
    assert done.returncode == 2
    assert "--set: expected KEY=VALUE, got 'server.socket'" in done.stderr


def test_examples_say_how_to_get_what_they_lack(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "r2r.toml"
    assert cli.main(["check", "-c", str(example)]) == cli.EXIT_CONFIG
    complaint = capsys.readouterr().err
    assert "models.small.path: no model directory" in complaint
    assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B; " in complaint.splitlines()[-1]


def test_check_counts_what_it_looked_at(tmp_path: Path) -> None:
    (tmp_path / "trouterd.toml").write_text(cli.DEMO_CONFIG)
    assert trouterd("check", cwd=tmp_path).stdout == "ok: 2 models, 1 route\n"


def test_config_without_a_file_documents_models_and_routes_too(tmp_path: Path) -> None:
    done = trouterd("config", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not tomllib.loads(done.stdout).keys() & {"models", "routes"}
    assert "# [models.NAME]" in done.stdout
    assert "\n# path = ...\n" in done.stdout
    assert '\n# dtype = "auto"\n' in done.stdout
    assert "# [routes.NAME]" in done.stdout
    assert "\n# models = ...\n" in done.stdout


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from trouterd.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    command = [module_command("x")[0], "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert not {"torch", "aiohttp", "numpy", "rich", "transformers"} & set(done.stdout.split())


def test_folder_of_the_same_name_is_not_taken_for_ours(tmp_path: Path) -> None:
    """A working directory that holds somebody's `models` package is common."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    assert trouterd("version", cwd=tmp_path).returncode == 0


def test_foreign_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from trouterd.cli import main; sys.exit(main(['version']))"
    )
    done = subprocess.run([module_command("x")[0], "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert f"the package 'models' comes from {tmp_path}/models" in done.stderr
