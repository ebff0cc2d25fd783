"""Starting and ending MPS for models that share a GPU, with a stand-in for NVIDIA's program."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.supervisor.conftest import Start
from tests.supervisor.daemon import PATIENCE, Daemon, alive, gpu_config
from trouterd.config import Config, Gpu, Model, Server
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.supervisor import mps
from trouterd.supervisor.mps import Mps

FAKE = Path(__file__).with_name("fake_mps.sh")


@pytest.fixture(autouse=True)
def mps_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in as the one on the PATH; whatever it has started is gone at the end."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / mps.CONTROL
    program.write_text(FAKE.read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps, "PATIENCE", PATIENCE)
    yield program
    if pid := daemon_pid(tmp_path):
        os.kill(pid, signal.SIGKILL)


def daemon_pid(folder: Path) -> int:
    """The MPS daemon beside the control socket in a folder, 0 if there is none."""
    try:
        return int((folder / "api.mps" / "pipe" / f"{mps.CONTROL}.pid").read_text())
    except FileNotFoundError:
        return 0


def environ(daemon: Daemon, name: str) -> dict[str, str]:
    """CUDA variables that a worker was started with."""
    found: dict[str, str] = daemon.model(name)["environ"]
    return found


def pair(folder: Path, **keys: object) -> Config:
    config = gpu_config(folder, small="weights=100", large="weights=200")
    large = msgspec.structs.replace(config.models["large"], **keys)
    return msgspec.structs.replace(config, models=config.models | {"large": large})


def test_workers_of_a_shared_gpu_are_clients_of_a_daemon_that_ends_with_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    daemon = start(pair(tmp_path, sm_percent=70)).wait_ready()
    folder = tmp_path / "api.mps"
    directories = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert environ(daemon, "small") == directories
    assert environ(daemon, "large") == directories | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"}
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "pipe", folder / "log")] == [0o700] * 3
    assert "CUDA_VISIBLE_DEVICES" not in (folder / "log" / "env").read_text(), "or it would be applied twice"
    pid = daemon_pid(tmp_path)
    assert alive(pid)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert not alive(pid)
    assert not folder.exists()


def test_failed_start_leaves_no_daemon(start: Start, tmp_path: Path) -> None:
    daemon = start(gpu_config(tmp_path, small="weights=100", large="weights=900"))
    assert daemon.wait() == 78
    assert "gpu.mps: started" in daemon.log
    assert not (tmp_path / "api.mps").exists()


def test_what_a_killed_supervisor_left_is_replaced(start: Start, tmp_path: Path) -> None:
    first = start(pair(tmp_path)).wait_ready()
    left = daemon_pid(tmp_path)
    first.process.kill()
    first.wait()
    assert alive(left)
    second = start(pair(tmp_path)).wait_ready()
    assert not alive(left)
    assert alive(daemon_pid(tmp_path))
    second.signal(signal.SIGTERM)
    assert second.wait() == 0


def test_daemon_that_died_is_started_again_with_the_next_worker(start: Start, tmp_path: Path) -> None:
    daemon = start(pair(tmp_path)).wait_ready()
    first = daemon_pid(tmp_path)
    os.kill(first, signal.SIGKILL)
    os.kill(daemon.child("small")["pid"], signal.SIGKILL)
    daemon.wait_for(lambda: daemon.child("small")["epoch"] == 2 and daemon.child("small")["state"] == "up", "restart")
    assert "CUDA_MPS_PIPE_DIRECTORY" in environ(daemon, "small")
    assert daemon_pid(tmp_path) not in (0, first)
    daemon.wait_log("the MPS daemon is gone; starting it again")


def test_daemon_of_somebody_else_is_used_and_left_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somebody/else")
    daemon = start(pair(tmp_path, sm_percent=70)).wait_ready()
    assert environ(daemon, "small") == {"CUDA_MPS_PIPE_DIRECTORY": "/somebody/else"}
    assert environ(daemon, "large")["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "70"
    assert not (tmp_path / "api.mps").exists()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "using the daemon of CUDA_MPS_PIPE_DIRECTORY=/somebody/else" in daemon.log


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("", "gpu.mps: no nvidia-cuda-mps-control on the PATH; models that share a GPU take turns on it"),
        ("fail", "gpu.mps: nvidia-cuda-mps-control -d failed with code 3: no GPU was found; models that share"),
    ],
)
def test_without_mps_models_take_turns(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mps_on_path: Path, mode: str, words: str
) -> None:
    if mode:
        monkeypatch.setenv("FAKE_MPS", mode)
    else:
        mps_on_path.unlink()
    daemon = start(pair(tmp_path, sm_percent=70)).wait_ready()
    assert environ(daemon, "small") == environ(daemon, "large") == {}
    assert "WARNING" in daemon.wait_log(words)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def shared(folder: Path, **models: Model) -> Config:
    return Config(server=Server(control=str(folder / "api.ctl")), models=models)


def on_gpu(path: Path, device: str = "cuda:0", tensor_parallel: int = 1) -> Model:
    return Model(path=str(path), device=device, tensor_parallel=tensor_parallel)


async def variables(config: Config) -> dict[str, dict[str, str]]:
    """Each model's variables under a daemon that is ended again; those of directories are cut off."""
    one = Mps(config, os.environ)
    await one.start()
    try:
        found = {name: await one.variables(name) for name in config.models}
    finally:
        await one.stop()
    return {name: {key[9:]: value for key, value in held.items() if "DIR" not in key} for name, held in found.items()}


async def test_multiprocessors_are_limited_where_the_model_says_so(tmp_path: Path) -> None:
    small, large = on_gpu(SMALL_DIRECTORY), on_gpu(LARGE_DIRECTORY)
    limited = msgspec.structs.replace(large, sm_percent=50)
    assert await variables(shared(tmp_path, small=small, large=large)) == {"small": {}, "large": {}}
    assert await variables(shared(tmp_path, small=small, large=limited)) == {
        "small": {},
        "large": {"ACTIVE_THREAD_PERCENTAGE": "50"},
    }


async def test_no_daemon_where_none_is_asked_for(tmp_path: Path) -> None:
    small, other = on_gpu(SMALL_DIRECTORY), on_gpu(SMALL_DIRECTORY, "cuda:1")
    for config in (
        shared(tmp_path, small=small, other=other),
        msgspec.structs.replace(shared(tmp_path, small=small, twin=small), gpu=Gpu(mps="off")),
        shared(tmp_path, small=msgspec.structs.replace(small, device="cpu"), twin=small),
    ):
        one = Mps(config, os.environ)
        await one.start()
        assert [await one.variables(name) for name in config.models] == [{}, {}]
        assert not (tmp_path / "api.mps").exists()


async def test_daemon_that_does_not_quit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    small = on_gpu(SMALL_DIRECTORY)
    one = Mps(shared(tmp_path, small=small, twin=small), os.environ)
    await one.start()
    pid = daemon_pid(tmp_path)
    assert alive(pid)
    monkeypatch.setattr(mps, "PATIENCE", 0.3)
    await one.stop()
    async with asyncio.timeout(PATIENCE):
        while alive(pid):
            await asyncio.sleep(0.01)


async def test_daemon_that_does_not_answer_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Mps._answers

    async def once_started(one: Mps) -> bool:
        monkeypatch.setattr(mps, "PATIENCE", 0.3)
        return await answers(one)

    monkeypatch.setattr(Mps, "_answers", once_started)
    monkeypatch.setenv("FAKE_MPS", "mute")
    small = on_gpu(SMALL_DIRECTORY)
    assert await variables(shared(tmp_path, small=small, twin=small)) == {"small": {}, "twin": {}}
    assert "gpu.mps: the MPS daemon does not answer; models that share a GPU take turns" in caplog.text
    assert not (tmp_path / "api.mps").exists()


async def test_folder_that_cannot_be_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = on_gpu(SMALL_DIRECTORY)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "api.mps").symlink_to(elsewhere)
    config = shared(tmp_path, small=small, twin=small)
    assert await variables(config) == {"small": {}, "twin": {}}
    assert f"{tmp_path}/api.mps is not a folder of our own" in caplog.text
    assert list(elsewhere.iterdir()) == []


async def test_path_that_is_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = on_gpu(SMALL_DIRECTORY)
    config = shared(tmp_path / ("x" * 90), small=small, twin=small)
    assert await variables(config) == {"small": {}, "twin": {}}
    assert "is too long for the daemon's sockets; choose a shorter server.control" in caplog.text
