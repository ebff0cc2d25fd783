"""The peer's Std. Serving through a folder of stand-ins, and foreign servers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.fetch import FetchError
from bench.foreign import ForeignError, foreign
from bench.peer_folder import PeerError
from bench.vllm_peer import main, run_std_serving
from tests.supervisor.test_mps import FAKE
from trouterd.supervisor import mps

SCRIPT = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("small", "large", "conc", "p", "tokens"):
    parser.add_argument("--" + name)
options = parser.parse_args()
print("loading")
print(json.dumps({"event": "loaded", "site": os.environ["VLSITE"], "mps": os.environ.get("CUDA_MPS_PIPE_DIRECTORY")}))
for count in map(int, options.conc.split(",")):
    for p in map(float, options.p.split(",")):
        print(json.dumps({"system": "x", "conc": count, "p": p, "tok_s": count * 10, "gap_ms_p50": 1.5, "gap_ms_p99": 9}))
    print(json.dumps({"system": "y", "conc": count, "tok_s": count * int(options.tokens)}), flush=True)
ENDING
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the script, and a stand-in for MPS on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / mps.CONTROL).write_text(FAKE.read_text())
    (programs / mps.CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    folder = tmp_path / "peer"
    folder.mkdir()
    write(folder)
    return folder


def write(folder: Path, ending: str = "") -> None:
    (folder / "std_serving.py").write_text(SCRIPT.replace("ENDING", ending))


def run(folder: Path, limit: float = 60) -> list[tuple[str, int, float | None, float, float | None]]:
    sizes = {"small": "Qwen3-0.6B", "large": "Qwen3-32B"}
    cases = run_std_serving(folder, **sizes, streams=(1, 4), shares=(0.35,), tokens=64, limit=limit)
    return [(one.system, one.streams, one.p, one.tokens_per_second, one.gap_p50_ms) for one in cases]


EXPECTED = [
    ("vllm std serving", 1, 0.35, 10, 1.5),
    ("vllm large alone", 1, None, 64, None),
    ("vllm std serving", 4, 0.35, 40, 1.5),
    ("vllm large alone", 4, None, 256, None),
]


def test_cases(peer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(peer) == EXPECTED
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[0]["mps"].endswith("std.mps/pipe")
    assert not Path(lines[0]["mps"]).exists(), "MPS ends with the peer"


def once_there(file: Path) -> type[threading.Timer]:
    """A timer whose time is over when a file is there."""

    class Timer(threading.Timer):
        def run(self) -> None:
            while not file.exists() and not self.finished.wait(0.01):
                pass
            if not self.finished.is_set():
                self.function()

    return Timer


def test_what_came_in_time_counts(peer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = peer / "done"
    write(peer, f"open({str(done)!r}, 'w').close()\ntime.sleep(600)")
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Timer", once_there(done))
        assert run(peer) == EXPECTED
    (peer / "std_serving.py").write_text("import time\ntime.sleep(600)")
    with pytest.raises(PeerError, match=r"std_serving\.py measured nothing within 1 s"):
        run(peer, limit=1)


def test_faults(peer: Path) -> None:
    write(peer, "sys.exit(3)")
    with pytest.raises(PeerError, match=r"std_serving\.py ended with 3"):
        run(peer)
    write(peer, "print('{\"conc\": 1}')")
    with pytest.raises(PeerError, match=r"a line that cannot be read: '{\"conc\": 1}'"):
        run(peer)
    (peer / "std_serving.py").unlink()
    with pytest.raises(PeerError, match=r"std_serving\.py is not there"):
        run(peer)
    with pytest.raises(PeerError, match="published shapes only, not Qwen3-9B"):
        run_std_serving(peer, small="Qwen3-9B", large="Qwen3-32B", streams=(1,), shares=(0.1,), tokens=1)


def test_command_line(peer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main([str(peer), "--streams=2", "--p=0.1,0.2", "--tokens=8", f"--json={file}"]) == 0
    content = json.loads(file.read_text())
    assert [case["p"] for case in content["cases"]] == [0.1, 0.2, None]
    assert content["command"].startswith("python -m bench.vllm_peer")
    assert {"hardware", "versions", "commit"} < content.keys()
    assert main([str(tmp_path)]) == 1
    assert "std_serving.py is not there" in capsys.readouterr().err


class _Models(BaseHTTPRequestHandler):
    answer: Any

    def do_GET(self) -> None:
        body = json.dumps(self.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    _Models.answer = {"data": [{"id": "first"}, {"id": "second"}]}
    with ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_foreign_server(url: str) -> None:
    target = foreign(url)
    assert (target.name, target.url, target.model, target.gpus, target.counters) == (url, url, "first", 1, None)
    target = foreign(url, "second", name="theirs", gpus=2, body={"top_k": 1})
    assert (target.name, target.model, target.gpus, target.body) == ("theirs", "second", 2, {"top_k": 1})
    with pytest.raises(ForeignError, match="no model 'third'; there are first, second"):
        foreign(url, "third")
    _Models.answer = []
    with pytest.raises(ForeignError, match="its /v1/models is no list of models"):
        foreign(url)
    with pytest.raises(FetchError, match="Connection refused"):
        foreign("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="expected http://host:port"):
        foreign("https://127.0.0.1")
