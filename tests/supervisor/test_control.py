"""The control socket: verbs, live changes and refusals."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import msgspec

from tests.supervisor.conftest import Start
from tests.supervisor.daemon import gpu_config, toy_config
from trouterd.config import Batching
from trouterd.control import Call, Ping, pack_frame, receive_frame


def test_set_changes_every_worker_and_leaves_an_audit_line(start: Start) -> None:
    daemon = start(small="ok", large="ok").wait_ready()
    reply = daemon.ask("set", key="routes.r.params.threshold", value="0.4")
    assert reply.result == {"key": "routes.r.params.threshold", "old": 0.3, "new": 0.4, "pending": []}
    assert [worker["threshold"] for worker in daemon.status()["workers"].values()] == [0.4, 0.4]
    line = daemon.wait_log("routes.r.params.threshold: 0.3 -> 0.4")
    assert f"uid {os.getuid()} pid {os.getpid()}" in line
    os.kill(daemon.child("large")["pid"], signal.SIGKILL)
    daemon.wait_for(lambda: daemon.child("large")["epoch"] == 2 and daemon.child("large")["state"] == "up", "restart")
    assert daemon.status()["workers"]["large"]["threshold"] == 0.4, "a restarted worker starts with the new value"


def test_refused_changes_keep_the_old_value_everywhere(start: Start) -> None:
    daemon = start(small="ok", large="ok").wait_ready()
    for key, value, why in (
        ("routes.r.params.threshold", "7", "parameter 'threshold': expected float <= 1"),
        ("routes.r.params.threshold", "high", "only numbers are live"),
        ("server.socket", "/elsewhere", "not live"),
        ("server.drain_timeout", "-1", "expected float >= 0"),
        ("server.drain_timout", "1", "did you mean 'drain_timeout'"),
        ("routes.q.max_stall", "1", "no entry of 'routes'"),
    ):
        reply = daemon.ask("set", key=key, value=value)
        assert reply.refused, key
        assert why in reply.error
    workers = daemon.status()["workers"].values()
    assert [(worker["threshold"], worker["config"]) for worker in workers] == [(0.3, 30.0), (0.3, 30.0)]
    assert "trouterd.audit" not in daemon.log


def test_models_whose_kernels_need_all_of_a_gpu_keep_taking_turns(start: Start, tmp_path: Path) -> None:
    config = gpu_config(tmp_path, small="", large="")
    models = {
        name: msgspec.structs.replace(model, path="ok", megakernel="on", megakernel_percent=60)
        for name, model in config.models.items()
    }
    turns = msgspec.structs.replace(
        config, models=models, batching=Batching(overlap=False), gpu=msgspec.structs.replace(config.gpu, mps="off")
    )
    daemon = start(turns).wait_ready()
    reply = daemon.ask("set", key="batching.overlap", value=True)
    assert reply.refused
    assert reply.error.startswith("models.large.megakernel: on GPU 0 'small' says 'on' as well")
    assert not daemon.ask("set", key="batching.relax", value=True).error, "everything else may change"


def test_supervisor_itself_obeys_live_keys(start: Start) -> None:
    daemon = start().wait_ready()
    assert daemon.ask("set", key="server.drain_timeout", value=5).result["new"] == 5
    assert daemon.ask("drain").result["drain_timeout"] == 5
    assert daemon.wait() == 0


def test_stopped_worker_gets_a_change_later(start: Start) -> None:
    daemon = start(small="ok", large="ok", options={"scrape": 2.0}).wait_ready()
    pid = daemon.child("large")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        reply = daemon.ask("set", key="routes.r.params.threshold", value=0.6)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert reply.result["pending"] == ["large"]
    daemon.wait_for(lambda: daemon.status()["workers"]["large"].get("threshold") == 0.6, "applied after SIGCONT")


def test_parameter_is_not_taken_while_nobody_can_check_it(start: Start) -> None:
    daemon = start(small="silent")
    daemon.wait_log("small started")
    reply = daemon.wait_for(lambda: daemon.ask("set", key="routes.r.params.threshold", value=0.5), "reply")
    assert reply.refused
    assert "no worker is up" in reply.error


def test_reload_applies_live_keys_and_names_the_others(start: Start, tmp_path: Path) -> None:
    daemon = start().wait_ready()
    config = toy_config(tmp_path)
    server = msgspec.structs.replace(config.server, drain_timeout=3.0, max_body_bytes=4096)
    daemon.file.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, server=server)))
    daemon.signal(signal.SIGHUP)
    daemon.wait_log("server.drain_timeout: 30.0 -> 3.0 by reload")
    daemon.wait_log("server.max_body_bytes: not live")
    assert daemon.ask("drain").result["drain_timeout"] == 3.0


def test_reload_applies_changes_that_only_fit_together(start: Start, tmp_path: Path) -> None:
    """One model may wait for two requests, and which one changes."""
    lists = {"models.small.thresholds": [], "models.large.thresholds": [1, 2]}
    daemon = start(small="ok", large="ok").wait_ready()
    for key, value in lists.items():
        assert not daemon.ask("set", key=key, value=value).error
    config = toy_config(tmp_path, small="ok", large="ok")
    models = config.models | {"small": msgspec.structs.replace(config.models["small"], thresholds=[1, 2])}
    daemon.file.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, models=models)))
    daemon.signal(signal.SIGHUP)
    daemon.wait_log("models.large.thresholds: [1, 2] -> [] by reload")
    daemon.wait_log("models.small.thresholds: [] -> [1, 2] by reload")
    assert "all models could wait" not in daemon.log


def test_metrics_of_all_processes(start: Start) -> None:
    daemon = start(small="ok", large="ok").wait_ready()
    os.kill(daemon.child("large")["pid"], signal.SIGKILL)
    daemon.wait_for(lambda: daemon.child("large")["state"] == "up" and daemon.child("large")["epoch"] == 2, "restart")
    families = daemon.ask("metrics").result
    restarts = next(family for family in families if family["name"] == "worker_restarts")
    assert {sample["labels"]["process"]: sample["value"] for sample in restarts["samples"]} == {
        "api": 0,
        "small": 0,
        "large": 1,
    }
    steps = [family["samples"][0]["labels"]["model"] for family in families if family["name"] == "worker_steps"]
    assert steps == ["small", "large"]


def test_verbs_that_children_answer(start: Start) -> None:
    daemon = start(small="ok", large="ok").wait_ready()
    assert daemon.ask("flush-cache").result == {"small": 1, "large": 1}
    models = daemon.ask("models").result
    assert [(model["name"], model["context"]) for model in models["models"]] == [("small", 64), ("large", 64)]
    assert models["routes"][0]["params"] == {"threshold": 0.3}
    refused = daemon.ask("abort", id="17")
    assert refused.refused
    assert "'17'" in refused.error
    missing = daemon.ask("requests").result
    assert "no verb 'requests'" in missing["workers"]["small"]["error"]
    unknown = daemon.ask("selfdestruct")
    assert "unknown verb" in unknown.error
    assert not unknown.refused
    assert "set needs key and value" in daemon.ask("set").error
    assert "abort needs id" in daemon.ask("abort").error


def test_a_process_that_starts_says_so_whatever_it_is_asked(start: Start) -> None:
    daemon = start(small="silent", large="ok")
    for name in ("api", "large"):
        daemon.wait_log(f"{name} ready after")
    assert daemon.child("small")["state"] == "starting"
    starting = {"error": "small is starting; ask again when it is up"}
    assert daemon.ask("batching").result["models"]["small"] == starting
    for verb in ("flush-cache", "batching-report"):
        assert daemon.ask(verb).result["small"] == starting, verb
    for verb in ("status", "requests"):
        assert daemon.ask(verb).result["workers"]["small"] == starting, verb
    assert daemon.ask("trace", seconds=1.0).result["models"]["small"] == starting
    change = daemon.ask("set", key="batching.relax", value=True).result
    assert change["pending"] == ["small"], "a change reaches it all the same"


def test_foreign_bytes_close_one_connection_only(start: Start) -> None:
    daemon = start().wait_ready()
    call = b"\x84\xa4type\xa4Call\xa2id\x01\xa4verb\xa6status\xa4args\x81\xa1a" + b"\x91" * 100_000 + b"\x01"
    deep = len(call).to_bytes(4, "little") + call
    for garbage in (b"\xff\xff\xff\xff", b"\x02\x00\x00\x00hi", pack_frame(Ping(number=1)), deep):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(daemon.config.server.control)
            link.sendall(garbage)
            assert receive_frame(link) is None
    assert daemon.status()["state"] == "ready"
    daemon.wait_log("undecodable control frame: maximum recursion depth")


def test_caller_that_is_gone_before_its_answer(start: Start) -> None:
    daemon = start(options={"scrape": 2.0}).wait_ready()
    pid = daemon.child("small")["pid"]
    os.kill(pid, signal.SIGSTOP)  # the answer takes as long as a call to a child may
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(daemon.config.server.control)
            link.sendall(pack_frame(Call(id=1, verb="status")) * 2)
        daemon.wait_log("Connection lost")
    finally:
        os.kill(pid, signal.SIGCONT)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait()
    assert "never retrieved" not in daemon.log


def test_sockets_are_private_under_any_umask(start: Start) -> None:
    def without_umask(command: list[str]) -> list[str]:
        return ["sh", "-c", 'umask 000 && exec "$@"', "sh", *command]

    daemon = start(options={"launcher": without_umask}).wait_ready()
    for path in (daemon.config.server.socket, daemon.config.server.control):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
