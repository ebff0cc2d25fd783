"""The bench of steps on a tiny model: what it drives, what it counts, what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.r2r_router import RouterFile
from bench import step
from bench.experiment_setup import head_inputs
from bench.peer_folder import PeerError
from bench.step_floor import Ceilings, step_work
from bench.step_heads import make_head, write_head
from bench.step_kernels import Interval, Profile, summarise
from bench.step_model import open_runner
from bench.step_peer import run_peer
from bench.step_rig import Rig, TooLargeError
from bench.step_shapes import SHAPES, write_shape
from models.config import ModelConfig
from models.device_runner import DeviceRunner
from models.resident import OWN_TOKEN, SlotSetup, StepRecord, StepRows
from models.torch_rows import TorchRows
from models.torch_runner import TorchRunner
from tests.models.tiny import tiny_llama, tiny_qwen3

torch.set_num_threads(1)

SMALL = """
    --device=cpu --dtype=float32 --batches=1,3 --contexts=20,40 --extend-batches=1,2 --extend-tokens=1,3 --extend-context=30
    --prefill=8,50 --generate-batches=1,2 --prompt=9 --output=12 --steps=20 --seconds=0.05
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), layers=1, hidden=16, heads=2, kv_heads=1)


@pytest.mark.parametrize("head", ["entropy", "none"])
def test_all_sections(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str) -> None:
    files = [f"--json={tmp_path / 'r.json'}", f"--markdown={tmp_path / 'r.md'}"]
    assert step.main([f"--model={model}", *SMALL, f"--head={head}", *files]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert [(case["batch"], case["context"]) for case in result["decode"]] == [(1, 20), (3, 20), (1, 40), (3, 40)]
    assert [(case["batch"], case["count"]) for case in result["extend"]] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert [case["count"] for case in result["prefill"]] == [8, 50]
    assert [(case["batch"], case["output"]) for case in result["generate"]] == [(1, 12), (2, 12)]
    assert result["skipped"] == ["profile 8x1: the profiler sees no kernels of a CUDA device"]
    for section in ("decode", "extend", "prefill", "generate"):
        for case in result[section]:
            assert 0 < case["device_ms"] <= case["launch_us"] / 1e3 * 2
            assert case["floor_ms"] > 0
            assert case["worst_ms"] >= case["wall_ms"] > 0
    assert result["options"] == {
        "depth": 2,
        "graphs": True,
        "megakernel": True,
        "kernel_percent": 100,
        "head": head,
        "temperature": 0.0,
    }
    assert result["command"].startswith(f"python -m bench.step --model={model} --device=cpu")
    report = (tmp_path / "r.md").read_text()
    assert report in capsys.readouterr().out
    assert report.count("| batch |") == 3
    assert "| batch | context 20 | context 40 | host us: launch / poll |" in report


def test_cases_that_do_not_fit_are_named(model: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "--sections=decode", "--kv-tokens=160", f"--json={tmp_path / 'r.json'}"]
    assert step.main([f"--model={model}", *arguments]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert [(case["batch"], case["context"]) for case in result["decode"]] == [(1, 20), (3, 20), (1, 40)]
    assert result["skipped"] == ["decode batch 3 context 40: 192 tokens of KV, but the pool holds 160"]


def test_nothing_measured_is_a_failure(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sections=profile", "--profile-steps=4x2,1x1", "--extend-context=1024", f"--json={tmp_path / 'r.json'}"]
    assert step.main([f"--model={model}", *SMALL, *sizes]) == 1
    said = capsys.readouterr()
    assert said.err == "bench.step: nothing was measured: every case was left out\n"
    skipped = json.loads((tmp_path / "r.json").read_text())["skipped"]
    assert skipped == [
        f"profile {size}: {tokens} tokens, but the context length is 512"
        for size, tokens in (("4x2", 1026), ("1x1", 1025))
    ]
    assert all(f"left out: {case}" in said.out for case in skipped)


def test_what_cannot_be_measured_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert step.main(["--shape=Qwen3-0.6B", *SMALL]) == 2
    assert step.main([f"--model={tmp_path}", *SMALL]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "bench.step: error: random weights are made on a CUDA device only; name a checkpoint with --model"
    assert second.startswith(f"bench.step: error: {tmp_path / 'config.json'}: ")
    for wrong in ("--batches=0", "--batches=", "--sections=decode,nap", "--kernel-percent=0", "--profile-steps=4x0"):
        with pytest.raises(SystemExit):
            step.main([f"--model={tmp_path}", wrong])


def test_profiles_of_steps(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(run: Callable[[], None], steps: int) -> Profile:
        run()
        return summarise([Interval("product", 0, 90), Interval("attention", 100, 300)], steps)

    monkeypatch.setattr(step, "profile_steps", seen)
    files = [f"--json={tmp_path / 'r.json'}", f"--markdown={tmp_path / 'r.md'}"]
    sizes = ["--sections=profile", "--profile-steps=2x3,1x1,1x500"]
    assert step.main([f"--model={model}", *SMALL, *sizes, *files]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert [(found["batch"], found["count"], found["context"]) for found in result["profile"]] == [
        (2, 3, 30),
        (1, 1, 30),
    ]
    assert result["skipped"] == ["profile 1x500: 530 tokens, but the context length is 512"]
    report = (tmp_path / "r.md").read_text()
    assert (
        "Kernels of a step of 2 x 3 rows, context 30: 0 launches, 15 us, of which 0 us with no kernel at work" in report
    )
    assert "| attention | 0.1 | 10.0 |" in report


class Recorder:
    """Resident that answers a step only when the one behind it is launched, or nothing more is."""

    depth = 2
    vocab_size, hidden_size, context_length, page_size, num_pages = 9, 4, 512, 16, 64
    max_stop_ids = 4

    def __init__(self) -> None:
        self.setups: dict[int, SlotSetup] = {}
        self.pages: dict[int, list[int]] = {}
        self.launched: list[StepRows] = []
        self.deepest = 0
        self._polled = 0
        self._asked = 0

    @property
    def in_flight(self) -> int:
        return len(self.launched) - self._polled

    def setup(self, setup: SlotSetup) -> None:
        self.setups[setup.slot] = setup

    def set_pages(self, slot: int, first: int, pages: list[int]) -> None:
        assert first == 0
        self.pages[slot] = pages

    def launch(self, rows: StepRows) -> int:
        self.launched.append(rows)
        self.deepest = max(self.deepest, self.in_flight)
        return len(self.launched)

    def poll(self) -> StepRecord | None:
        self._asked += 1
        if self._asked % 2:
            return None
        self._polled += 1
        count = len(self.launched[self._polled - 1].logit_rows)
        zeros, ones = np.zeros(count, np.int32), np.ones(count, bool)
        return StepRecord(self._polled, ones, zeros, zeros, ones, 0.25)


def rig(runner: Any, **settings: Any) -> Rig:
    return Rig(runner, max_slots=4, **{"most_steps": 30, "seconds": 10.0} | settings)


def test_decode_keeps_steps_queued_around_the_context() -> None:
    runner = Recorder()
    timing = rig(runner, route=0, params=(7.0,)).decode(3, 100)
    assert (timing.steps, timing.device_ms) == (30, 250.0)
    first, *rest = runner.launched
    assert first.positions.tolist() == [85, 85, 85]
    assert len(rest) == 40
    assert all(rows.tokens.tolist() == [OWN_TOKEN] * 3 and rows.slots.tolist() == [0, 1, 2] for rows in rest)
    assert runner.deepest == 2
    assert runner.setups[2].prompt_length == 86
    assert (runner.setups[2].route, runner.setups[2].params) == (0, (7.0,))
    pages = [page for slot in range(3) for page in runner.pages[slot]]
    assert len(set(pages)) == len(pages) == 3 * -(-(85 + 41) // 16)


def test_extend_feeds_the_last_rows_of_each_request() -> None:
    runner = Recorder()
    rig(runner).extend(2, 3, 50)
    rows = runner.launched[0]
    assert rows.slots.tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.positions.tolist() == [50, 51, 52] * 2
    assert rows.logit_rows.tolist() == [2, 5]
    assert OWN_TOKEN not in rows.tokens


def test_steps_for_a_profiler_are_as_many_as_asked_for() -> None:
    runner = Recorder()
    rig(runner).repeat(2, 3, 50, 7)
    assert [rows.positions.tolist() for rows in runner.launched] == [[50, 51, 52] * 2] * 7


def test_answers_begin_with_their_prompts() -> None:
    runner = Recorder()
    timing, prompts = rig(runner).generate(2, 20, 11)
    assert prompts > 0
    assert timing.steps == 10
    assert runner.launched[0].positions.tolist() == [*range(20)] * 2
    assert runner.setups[0].prompt_length == 20
    assert len(runner.launched) == 11


def test_requests_that_end_are_an_error(model: Path) -> None:
    """On the real runner with a head that sends rows away: the bench must not time steps of nobody."""
    rows = TorchRows(TorchRunner.load(model, num_pages=64, page_size=16))
    runner = DeviceRunner(rows, max_slots=4, max_pages=32)
    head = make_head("entropy", runner, torch.device("cpu"))
    assert head is not None
    assert runner.set_routes([head.route]) == (True,)
    rig(runner, route=0, params=head.params).decode(2, 40)
    with pytest.raises(RuntimeError, match="requests ended that should not have"):
        rig(runner, route=0, params=(0.0,)).decode(2, 40)
    with pytest.raises(TooLargeError, match="5 requests, but there are 4 slots"):
        rig(runner).decode(5, 40)
    with pytest.raises(TooLargeError, match="the context length is 512"):
        rig(runner).decode(1, 500)


@pytest.mark.parametrize("name", ["citer", "collm"])
def test_heads_keep_their_rows(model: Path, name: str) -> None:
    rows = TorchRows(TorchRunner.load(model, num_pages=64, page_size=16))
    runner = DeviceRunner(rows, max_slots=4, max_pages=32)
    head = make_head(name, runner, torch.device("cpu"))
    assert head is not None
    assert runner.set_routes([head.route]) == (True,)
    rig(runner, route=0, params=head.params).decode(2, 40)


def test_router_of_a_small_model_is_the_one_that_training_gives_it(tmp_path: Path) -> None:
    """The published one beside the demo's small model of 128 values would take ten times as long as the model."""
    inputs = head_inputs("builtin:small")
    assert inputs is not None
    write_head("r2r", tmp_path / "head", inputs)
    assert RouterFile.load(tmp_path / "head", "checkpoint").widths == (128, 128)


def test_router_of_the_published_size(model: Path) -> None:
    """R2R's router over a hidden size of 1,024 has 54.68 million trainable weights; three maps of it are folded into one."""

    class Small:
        vocab_size, hidden_size = 200, 1024
        embedding = torch.zeros(200, 1024)

    head = make_head("r2r-bfloat16", Small(), torch.device("cpu"))  # type: ignore[arg-type]
    assert head is not None
    trainable, folded_away = 54_680_000, 100 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * (1024 - 100)
    assert head.bytes / 2 == pytest.approx(trainable - folded_away, rel=1e-3)
    citer = make_head("citer", Small(), torch.device("cpu"))  # type: ignore[arg-type]
    assert citer is not None
    # 4.2 million trainable weights, of which the second map of 1,024 times 2,048 is folded away.
    assert citer.bytes / 4 == pytest.approx(4_200_000 - 2048 * 1024, rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_floor_counts_what_files_hold(tmp_path: Path, tied: bool) -> None:
    config = ModelConfig.load(tiny_llama(tmp_path, tied=tied))
    weights = sum(tensor.numel() for tensor in _tensors(tmp_path).values()) - (0 if tied else 260 * 32)
    work = step_work(config, 2, runs=3, start=100, count=4, head_bytes=1000)
    kv = 3 * 104 * 2 * 2 * (2 * 16) * 2
    assert work.bytes == weights * 2 + kv + 1000
    # One row at position 0 of one request sees one key: 2 layers of 4 heads of 16.
    alone = step_work(config, 2, runs=1, start=0, count=1)
    norms = 5 * 32
    assert alone.flop == pytest.approx(2 * weights + 4 * 2 * 64, abs=2 * norms + 1)
    longer = step_work(config, 2, runs=1, start=0, count=3)
    assert longer.flop - alone.flop == pytest.approx(2 * 2 * (weights - 260 * 32) + 4 * 2 * 64 * 5, rel=0.01)
    ceilings = Ceilings(copy_bytes_per_s=1e6, matmul_flop_per_s=1e12)
    assert work.floor_ms(ceilings) == pytest.approx(work.bytes / 1e3)
    assert work.bound(ceilings) == "bytes"
    assert work.bound(Ceilings(1e12, 1e3)) == "products"


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_shapes_have_the_published_sizes(tmp_path: Path) -> None:
    counts = [ModelConfig.load(write_shape(name, tmp_path)).parameters() for name in SHAPES]
    assert counts == [596_049_920, 1_720_574_976, 4_022_468_096, 8_190_735_360, 14_768_307_200, 32_762_123_264]
    assert ModelConfig.load(write_shape("Qwen3-32B", tmp_path, layers=2)).num_layers == 2


def test_overlapping_kernels_are_busy_once() -> None:
    events = [Interval("b", 20, 30), Interval("a", 0, 10), Interval("a", 8, 14), Interval("b", 22, 24)]
    found = summarise(events, 2)
    assert (found.span_us, found.idle_us, found.launches) == (15.0, 3.0, 2.0)
    assert [(kernel.name, kernel.per_step, kernel.us_per_step) for kernel in found.kernels] == [
        ("a", 1.0, 8.0),
        ("b", 1.0, 6.0),
    ]


INSTALLER = """
import pathlib, sys
folder, target = map(pathlib.Path, sys.argv[1:])
target.mkdir()
(target / "here").write_text(folder.name)
"""
PEER = """
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
for flag in ("models", "conc", "prompt", "out-len", "out"):
    parser.add_argument("--" + flag)
options = parser.parse_args()
site = pathlib.Path(os.environ["VLSITE"])
assert (site / "here").read_text() == "peer"
facts = {"vllm": "0.0", "model": options.models, "prompt": options.prompt, "out": options.out_len}
with open(options.out, "a") as file:
    print(json.dumps(facts | {"event": "loaded"}), file=file)
    for batch in map(int, options.conc.split(",")):
        print(json.dumps(facts | {"conc": batch, "step_ms": batch / 2, "prefill_plus_1_ms": 3.0}), file=file)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    folder = tmp_path / "peer"
    folder.mkdir()
    (folder / "unpack.py").write_text(INSTALLER)
    (folder / "bench_vllm.py").write_text(PEER)
    return folder


def test_peer(peer: Path) -> None:
    steps = run_peer(peer, "Qwen3-0.6B", (1, 8), 100, 256)
    assert [(step.version, step.batch, step.step_ms, step.prompts_ms) for step in steps] == [
        ("0.0", 1, 0.5, 3.0),
        ("0.0", 8, 4.0, 3.0),
    ]
    with pytest.raises(PeerError, match="published shapes only"):
        run_peer(peer, None, (1,), 100, 256)
    (peer / "bench_vllm.py").write_text("raise SystemExit(3)")
    with pytest.raises(PeerError, match=r"bench_vllm\.py ended with 3"):
        run_peer(peer, "Qwen3-0.6B", (1,), 100, 256)
    (peer / "bench_vllm.py").unlink()
    with pytest.raises(PeerError, match=r"bench_vllm\.py is not there"):
        run_peer(peer, "Qwen3-0.6B", (1,), 100, 256)


def test_peer_in_the_report(model: Path, peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape's place is taken by a tiny model: random weights need CUDA."""
    monkeypatch.setattr(step, "write_shape", lambda *_: model)
    monkeypatch.setattr(step, "open_runner", lambda options: open_runner(replace(options, dummy=False)))
    files = [f"--json={tmp_path / 'r.json'}", f"--markdown={tmp_path / 'r.md'}"]
    assert step.main(["--shape=Qwen3-0.6B", *SMALL, "--sections=generate", f"--vllm={peer}", *files]) == 0
    first, second = json.loads((tmp_path / "r.json").read_text())["generate"]
    assert (first["peer_step_ms"], second["peer_step_ms"], second["peer_version"]) == (0.5, 1.0, "0.0")
    report = (tmp_path / "r.md").read_text()
    assert "peer: vLLM 0.0" in report
    assert f"| 0.500 | {0.5 / first['wall_ms']:.2f}x |" in report
