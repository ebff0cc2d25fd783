"""Two models side by side: their processes, what they say, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import beside
from bench.beside_pair import Pair, table
from tests.models.tiny import tiny_qwen3

LOADS = """
    --small-steps=1x1 --large-steps=2x3 --context=20 --seconds=0.2 --percent=0 --device=cpu --dtype=float32
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), layers=1, hidden=16, heads=2, kv_heads=1)


def test_two_processes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    assert beside.main([f"--small={model}", f"--large={model}", *LOADS, f"--json={file}"]) == 0
    result = json.loads(file.read_text())
    (pair,) = result["pairs"]
    assert (pair["percent"], pair["small"], pair["large"]) == (0, "1x1", "2x3")
    assert min(pair[f"{name}_{when}"] for name in ("small", "large") for when in ("alone", "beside")) > 0
    assert result["command"].startswith(f"python -m bench.beside --small={model}")
    assert not result["mps"]
    assert "| 0 | 1x1 | 2x3 |" in capsys.readouterr().out


def test_a_model_that_cannot_be_opened(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beside.main([f"--small={model}", f"--large={tmp_path}", *LOADS]) == 2
    assert "models.large.path: no config.json" in capsys.readouterr().err
    assert beside.main([f"--small={model}", f"--large={model}", *LOADS, "--large-steps=2x300", "--context=70000"]) == 1
    assert "bench.beside: the large model: " in capsys.readouterr().err


def test_factors_are_what_a_plan_takes() -> None:
    pairs = [
        Pair(20, "4x1", "4x3", small_alone=1.0, small_beside=1.5, large_alone=20.0, large_beside=24.0),
        Pair(80, "4x1", "4x3", small_alone=1.0, small_beside=2.0, large_alone=20.0, large_beside=40.0),
        Pair(80, "4x1", "9x9", small_alone=1.0, small_beside=0.9, large_alone=20.0, large_beside=50.0),
    ]
    assert pairs[1].together == 1.0
    text = table(pairs)
    assert "| 20 | 4x1 | 4x3 | 1.000 | 1.500 | 20.00 | 24.00 | 0.50,0.20 | 1.50 |" in text
    assert "- 20 %: --contention 0.50,0.20, together 1.50" in text
    assert "- 80 %: --contention 0.45,1.25, together 1.26" in text


@pytest.mark.parametrize(
    "wrong", ["--percent=101", "--percent=-1", "--small-steps=4", "--large-steps=0x3", "--large-percent=101"]
)
def test_sizes_that_cannot_be(model: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        beside.main([f"--small={model}", f"--large={model}", *LOADS, wrong])
    assert f"{wrong.partition('=')[0]}: " in capsys.readouterr().err
