"""The bench of attention: what it asks a device for, and what it makes of the answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import attention
from bench.attention import Cut, candidates, cuts, measure, table
from bench.attention_load import AttentionLoad
from bench.attention_rig import AttentionRig, CutError
from bench.step_floor import Ceilings
from bench.step_shapes import write_shape
from bench.step_size import StepSize
from models.config import ModelConfig
from models.cuda.heads import HeadShape
from models.cuda.tiles import TileShape, choose_tiles

CPU = torch.device("cpu")


def load(size: StepSize, context: int, *, mixed: bool) -> AttentionLoad:
    return AttentionLoad.of(size, context, mixed=mixed, page_size=16, device=CPU)


def test_rows_of_equal_requests() -> None:
    found = load(StepSize(3, 2), 40, mixed=False)
    assert found.positions.tolist() == [40, 41] * 3
    assert found.leaders.tolist() == [0, 0, 2, 2, 4, 4]
    assert found.counts.tolist() == [2, 0, 2, 0, 2, 0]
    assert found.slots.tolist() == [0, 0, 1, 1, 2, 2]
    assert (found.keys, found.pages) == (3 * 42, 9)
    assert sorted(found.page_table.flatten().tolist()) == list(range(9))


def test_rows_of_requests_of_all_ages() -> None:
    found = load(StepSize(400, 5), 1000, mixed=True)
    firsts = found.counts.nonzero().flatten()
    starts, counts = found.positions[firsts].numpy(), found.counts[firsts].numpy()
    assert (starts.min(), starts.max()) == (102, 1898)
    assert abs(starts.mean() - 1000) < 1
    assert abs(counts.mean() - 5) < 0.05
    assert counts.min() == 1
    assert counts.max() > 15
    assert found.keys == (starts + counts).sum()
    assert found.page_table.shape == (400, -(-int((starts + counts).max()) // 16))
    for first, start, count in zip(firsts.tolist(), starts, counts, strict=True):
        assert np.array_equal(found.positions[first : first + count], np.arange(start, start + count))
        assert (found.leaders[first : first + count] == first).all()
    assert load(StepSize(4, 1), 50, mixed=True).positions.tolist() == [50] * 4
    few = load(StepSize(1, 3), 1000, mixed=True)
    assert few.positions[0] == 1000
    assert len(few.positions) == 2


def test_cuts_of_a_command_line() -> None:
    assert cuts("32x128x4x3,64x64x8x5") == (Cut(32, 128, 4, 3), Cut(64, 64, 8, 5))
    for wrong in ("", "32x128x4", "32x128x4x0", "32x128x4x3,", "32xax4x3"):
        with pytest.raises(argparse.ArgumentTypeError, match="QUERY_ROWSxKEYSxWARPSxSTAGES"):
            cuts(wrong)
    with pytest.raises(argparse.ArgumentTypeError, match="powers of two, not '48x64x4x3'"):
        cuts("48x64x4x3")


class Rig:
    """A device on which more query rows take longer, and six stages do not fit."""

    shape = HeadShape(heads=64, kv_heads=8, head_dim=128, page_size=16, eps=0.0)
    group, processors = 8, 132

    def in_use(self, rows: int, requests: int) -> TileShape:
        return choose_tiles(rows, requests, group=8, kv_heads=8, head_dim=128, dtype=torch.bfloat16, processors=132)

    def floor_us(self, load: AttentionLoad) -> float:
        return load.keys / 10

    def time_us(self, load: AttentionLoad, tiles: TileShape) -> float:
        if tiles.stages == 6:
            raise CutError("out of resource: shared memory")
        if tiles.query_rows < self.group:
            raise CutError("too few rows")
        return tiles.query_rows + load.keys / 1000 + tiles.whole_blocks


def test_every_cut_of_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    rig: Any = Rig()
    used = rig.in_use(4, 4)
    options = argparse.Namespace(
        steps=(StepSize(4, 1), StepSize(4, 3)),
        context=99,
        mixed=False,
        cuts=(
            Cut(used.query_rows, used.keys, used.warps, used.stages),
            Cut(32, 64, 4, 3),
            Cut(16, 64, 4, 6),
            Cut(4, 64, 4, 3),
        ),
        waves=(2,),
        least_keys=used.least_keys,
    )
    assert [tiles.query_rows for tiles in candidates(rig, options)] == [16, 16, 32, 32, 16, 16, 4, 4]
    found = list(measure(rig, options, CPU))
    assert [(one.step, one.in_use, one.tiles.query_rows, one.tiles.whole_blocks) for one in found] == [
        ("4x1", True, 16, False),
        ("4x1", False, 16, True),
        ("4x1", False, 32, False),
        ("4x1", False, 32, True),
        ("4x3", True, 64, False),
        ("4x3", False, 16, False),
        ("4x3", False, 16, True),
        ("4x3", False, 32, False),
        ("4x3", False, 32, True),
    ]
    assert capsys.readouterr().err.splitlines() == [
        f"left out: {step}, {cut}"
        for step in ("4x1", "4x3")
        for cut in ("16x64x4x6: out of resource: shared memory", "4x64x4x3: too few rows")
        for _ in range(2)
    ]
    lines = table(found, rig).splitlines()
    assert lines[2] == "| 4x1 | 4 | 400 | 16x128x4x3 (in use) | 2 | always | **16.4** | 40.0 |"
    assert lines[4] == "| 4x1 | 4 | 400 | 32x64x4x3 | 2 | always | 32.4 | 40.0 |"
    assert lines[6] == "| 4x3 | 12 | 408 | 64x64x4x5 (in use) | 2 | always | 64.4 | 40.8 |"
    assert lines[8] == "| 4x3 | 12 | 408 | 16x128x4x3 | 2 | where needed | 17.4 | 40.8 |"


def test_the_cut_in_use_is_that_of_the_graph_which_serves_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h200 = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    monkeypatch.setattr(Ceilings, "measure", lambda *_: SimpleNamespace(copy_bytes_per_s=4e12))
    rig = AttentionRig(ModelConfig.load(write_shape("Qwen3-32B", tmp_path)), CPU)

    def cut(rows: int, requests: int) -> str:
        tiles = rig.in_use(rows, requests)
        return f"{tiles.query_rows}x{tiles.keys}x{tiles.warps}x{tiles.stages}"

    assert cut(64, 64) == "16x128x4x3"
    assert cut(120, 40) == "16x128x4x3", "(128, 64)"
    assert cut(191, 64) == "64x64x4x5"
    assert cut(300, 300) == "128x64x8x2", "has no graph"


def test_a_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--shape=Qwen3-32B", "--device=cpu"]) == 2
    assert "--device cpu: attention is cut on CUDA devices only" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["--steps=2x1,2x3", "--context=200", "--cuts=64x64x4x3,256x256x8x3", "--mixed", f"--json={file}"]
    assert attention.main(["--shape=Qwen3-0.6B", *arguments]) == 0
    found = json.loads(file.read_text())["found"]
    # The larger cut fits onto no multiprocessor.
    assert [one["tiles"]["query_rows"] for one in found] == [16, 64, 64] * 2
    assert all(0 < one["us"] < 1000 for one in found)
