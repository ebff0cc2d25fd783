"""bench.serve on the demo pair, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.serve import main
from bench.step_tokenizer import write_tokenizer
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY


def test_small_and_routed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--small", str(SMALL_DIRECTORY), "--large", str(LARGE_DIRECTORY), "--device", "cpu", "--streams", "2"]
    arguments += ["--models", "small,routed", "--tokens", "60", "--prompt", "8", "--context", "128"]
    assert main([*arguments, "--params", "p = 0.5", "--json", str(tmp_path / "out.json")]) == 0
    small, routed = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert small["tokens_per_second"] > 0
    assert small["gap_p99_ms"] >= small["gap_p50_ms"] > 0
    assert 0 < small["of_the_step"] < 1.2
    assert small["large_share"] == 0
    assert 0.2 < routed["large_share"] < 0.8
    assert routed["handoffs_per_100"] == pytest.approx(200 * routed["large_share"], rel=0.1)
    assert "| routed | 2 |" in capsys.readouterr().out


def test_the_tokenizer_has_as_many_ids_as_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "t", 400) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.token_to_id("</s>") == 399
    assert tokenizer.decode(tokenizer.encode("what is this?").ids) == "what is this?"
    assert tokenizer.decode([300, 399]) == "w300 "
