"""Dividing a GPU between workers, through the real supervisor and control link."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from tests.supervisor.conftest import Start
from tests.supervisor.daemon import gpu_config


def test_models_of_a_gpu_get_the_largest_common_pool(start: Start, tmp_path: Path) -> None:
    daemon = start(
        gpu_config(tmp_path, small="weights=100,graphs=20,kv=1", large="weights=500,graphs=30,workspace=10,kv=4")
    ).wait_ready()
    assert [daemon.model(name)["kv_tokens"] for name in ("small", "large")] == [(900 - 660) // 5] * 2
    assert "small, large, KV pools of 48 tokens" in daemon.wait_log("GPU 0: ")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "heavy modules: none" in daemon.log


def test_one_that_dies_before_it_asks_keeps_the_other_waiting(start: Start, tmp_path: Path) -> None:
    config = gpu_config(tmp_path, small="weights=100", large="weights=500,dies=3")
    supervision = msgspec.structs.replace(config.supervision, start_attempts=9, restart_backoff=0.01)
    daemon = start(msgspec.structs.replace(config, supervision=supervision)).wait_ready()
    assert daemon.child("large")["restarts"] == 3
    assert daemon.child("small")["restarts"] == 0
    assert [daemon.model(name)["kv_tokens"] for name in ("small", "large")] == [150, 150]


def test_model_that_dies_while_it_waits_asks_again(start: Start, tmp_path: Path) -> None:
    daemon = start(gpu_config(tmp_path, small="weights=100,dies_waiting=2", large="weights=500,after=2")).wait_ready()
    assert daemon.child("small")["restarts"] == 2
    assert [daemon.model(name)["kv_tokens"] for name in ("small", "large")] == [150, 150]


def test_model_that_comes_back_gets_what_it_had(start: Start, tmp_path: Path) -> None:
    daemon = start(gpu_config(tmp_path, small="weights=100", large="weights=500,workspace=50,kv=2")).wait_ready()
    tokens = daemon.model("large")["kv_tokens"]
    assert tokens == 83
    # What is free now is less than at the start, by the other's pool; it must be enough, not the same.
    (tmp_path / "foreign").write_text(str(400 - 50 - 2 * tokens))
    os.kill(daemon.child("large")["pid"], signal.SIGKILL)
    daemon.wait_for(lambda: daemon.child("large")["state"] == "up" and daemon.child("large")["epoch"] == 2, "restart")
    assert daemon.model("large")["kv_tokens"] == tokens


def test_model_that_comes_back_waits_for_memory_that_others_took(start: Start, tmp_path: Path) -> None:
    daemon = start(gpu_config(tmp_path, small="weights=100", large="weights=500")).wait_ready()
    foreign = tmp_path / "foreign"
    foreign.write_text("300")
    pid = daemon.child("small")["pid"]
    os.kill(daemon.child("large")["pid"], signal.SIGKILL)
    line = daemon.wait_log("as agreed at start")
    assert "models.large: its KV pool of 150 tokens, as agreed at start" in line
    assert daemon.child("small")["pid"] == pid, "the other goes on"
    foreign.unlink()
    daemon.wait_for(lambda: daemon.child("large")["state"] == "up", "it comes back when the memory is free again")


def test_models_that_do_not_fit_end_the_daemon(start: Start, tmp_path: Path) -> None:
    daemon = start(gpu_config(tmp_path, small="weights=100", large="weights=850"))
    assert daemon.wait() == 78
    (line,) = [line for line in daemon.log.splitlines() if "CRITICAL" in line]
    assert (
        "gpu.memory_fraction: small, large need 0.950 of GPU 0 without any KV, or raise gpu.memory_fraction: 0.997"
        in line
    )


def test_context_that_does_not_fit_ends_the_daemon(start: Start, tmp_path: Path) -> None:
    daemon = start(gpu_config(tmp_path, small="weights=100", large="weights=700,context=51"))
    assert daemon.wait() == 78
    assert "models.large.context_length: one context of 51 tokens does not fit: GPU 0 has room for 50" in daemon.log


def test_memory_of_others_is_said_aloud(start: Start, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("300")
    daemon = start(gpu_config(tmp_path, small="weights=100")).wait_ready()
    assert daemon.model("small")["kv_tokens"] == 600 - 3
    daemon.wait_log("GPU 0: others hold memory")
