"""The runner without a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models.batch import Batch
from models.script import ScriptError, ScriptRunner


def batch(*output_index: int) -> Batch:
    count = len(output_index)
    rows = np.arange(count, dtype=np.int64)
    return Batch(rows, rows, rows, np.zeros((count, 1), np.int32), rows, np.array(output_index, np.int64))


def ids(runner: ScriptRunner, *output_index: int) -> list[int]:
    logits = runner.step(batch(*output_index)).logits
    assert logits.shape == (len(output_index), runner.vocab_size)
    return logits.argmax(-1).tolist()


def test_sequence_ends_with_eos() -> None:
    assert ids(ScriptRunner([5, 6], vocab_size=9, eos=8), 1, 0, 2, 100) == [6, 5, 8, 8]


def test_sequence_cycles() -> None:
    assert ids(ScriptRunner([5, 6, 7], vocab_size=9, cycle=True), 0, 4, 8) == [5, 6, 7]


def test_function_and_whole_rows() -> None:
    runner = ScriptRunner(lambda k: k % 9 if k < 20 else [0.0, 2.0, *[0.5] * 7], vocab_size=9)
    assert ids(runner, 3, 12, 20) == [3, 3, 1]
    assert runner.step(batch(20)).logits[0].tolist() == [0.0, 2.0, *[0.5] * 7]


def test_an_id_takes_all_mass_and_entropy_is_zero() -> None:
    logits = ScriptRunner([3], vocab_size=9).step(batch(0)).logits
    logprobs = logits.log_softmax(-1)
    assert logprobs.exp()[0, 3] == 1
    assert -(logprobs.exp() * logprobs).sum() == 0


def test_no_wanted_rows() -> None:
    for runner in (ScriptRunner([1], vocab_size=9), ScriptRunner(lambda k: k, vocab_size=9)):
        output = runner.step(batch())
        assert output.logits.shape == (0, 9)
        assert output.hidden.shape == (0, 8)


def test_failure_on_request() -> None:
    runner = ScriptRunner([1, 2, 3], vocab_size=9, fail_at=2)
    assert ids(runner, 0, 1) == [1, 2]
    with pytest.raises(RuntimeError, match="step 2"):
        runner.step(batch(0, 2))


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    row = [0.0, 0.0, 9.0, 0.0]
    path.write_text(json.dumps({"vocab_size": 4, "eos": 3, "ids": [1, 0], "delay_ms": 1, "logits": [None, None, row]}))
    runner = ScriptRunner.load(path)
    assert ids(runner, 0, 1, 2, 3) == [1, 0, 2, 3]
    assert not runner.inline


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"vocab_size": 4, "eos": 3, "idz": []}', "idz"),
        ('{"vocab_size": 4, "eos": 3, "ids": [7]}', "ids: 7 is outside"),
        ('{"vocab_size": 4, "eos": 3, "logits": [[1.0]]}', "1 values, vocab_size is 4"),
        ('{"vocab_size": "x", "eos": 3}', "vocab_size"),
        ('{"vocab_size": 258000000000000, "eos": 3}', "vocab_size"),
        ('{"vocab_size": 4, "eos": 3, "delay_ms": -1}', "delay_ms"),
        ('{"vocab_size": 4, "eos": 3, "num_pages": 0}', "num_pages"),
        ('{"vocab_size": 4, "eos": 3, "ids": ' + "[" * 100_000, "ids|recursion"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(content)
    with pytest.raises(ScriptError, match=message) as caught:
        ScriptRunner.load(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="No such file"):
        ScriptRunner.load(tmp_path / "none.json")
