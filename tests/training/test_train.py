"""`trouterd train` from prompts to checkpoint, on the demo pair."""

from __future__ import annotations

import signal
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import tiny_qwen3
from tests.training.conftest import Trained, options, train
from tests.training.pairs import config, demo_pair
from trouterd import cli
from trouterd.demo import LARGE_DIRECTORY
from trouterd.demo.problems import final_answer
from trouterd.interpreter import environment, module_command
from trouterd.training import shards as shard_files
from trouterd.training.citer import UNDECIDED, CiterTrainer
from trouterd.training.faults import TrainingError
from trouterd.training.head import Labels
from trouterd.training.judge import is_right
from trouterd.training.options import AlgorithmName
from trouterd.training.prompts import Prompt, load_prompts
from trouterd.training.r2r import R2RTrainer
from trouterd.training.shards import Shards
from trouterd.training.train import Run, work_folder
from trouterd.training.writing import write


@pytest.mark.parametrize("algorithm", ["citer", "r2r", "collm", "query"])
def test_train_twice(trained: Trained, algorithm: AlgorithmName) -> None:
    """The second run finds the labels of the first, and comes to the same head, threshold and report."""
    output, first = trained[algorithm]
    checkpoint = output.read_bytes()
    files = sorted(work_folder(output).iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    assert train(output, algorithm) == first
    assert output.read_bytes() == checkpoint
    assert [file.stat().st_mtime_ns for file in files] == times
    assert first["algorithm"] == algorithm
    assert 0 <= first["threshold"] <= 1
    assert first["hidden_size"] == 128
    assert first["target"] == "recall 0.8"
    report = first["report"]
    assert report["routed"]["prompts"] == 2
    recalls = [point["recall"] for point in report["curve"]]
    assert recalls == sorted(recalls)
    assert first["threshold"] in [point["threshold"] for point in report["curve"]]


def test_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "SHARD", 6)
    whole = train(tmp_path / "whole")
    made: list[int] = []
    cut: list[int] = []
    plain = Shards.collect

    def counted(self: Shards, name: str, items: Any, label: Any, done: Any, size: int = 0) -> Any:
        def interrupted(piece: Any, first: int) -> Any:
            if first == 12 and not cut:
                cut.append(first)
                raise InterruptedError
            made.append(first)
            return label(piece, first)

        return plain(self, name, items, interrupted, done, size)

    monkeypatch.setattr(Shards, "collect", counted)
    with pytest.raises(InterruptedError):
        train(tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    assert train(tmp_path / "cut") == whole
    assert made == [0, 6, 12]
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()
    for file in work_folder(tmp_path / "whole").iterdir():
        assert (work_folder(tmp_path / "cut") / file.name).read_bytes() == file.read_bytes()


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from trouterd.training.shards import Shards
def label(piece, first):
    if first == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"x": torch.tensor(piece)}
Shards(Path(sys.argv[1]), {"a": 1}).collect("n", range(5), label, print, 2)
"""


def test_killed_between_shards(tmp_path: Path) -> None:
    command = [module_command("x")[0], "-c", KILLED, str(tmp_path / "work")]
    assert subprocess.run(command, env=environment(), capture_output=True).returncode == -signal.SIGKILL
    made = []

    def label(piece: Sequence[int], first: int) -> dict[str, torch.Tensor]:
        made.append(first)
        return {"x": torch.tensor(piece)}

    found = Shards(tmp_path / "work", {"a": 1}).collect("n", range(5), label, lambda _: None, 2)
    assert found["x"].tolist() == [0, 1, 2, 3, 4]
    assert made == [2, 4]


def test_labels_of_other_arguments_are_refused(tmp_path: Path) -> None:
    Shards(tmp_path / "work", {"seed": 0, "judge": "text"}).collect("n", [1], _one, lambda _: None)
    with pytest.raises(TrainingError, match=r"other arguments \(seed; seed was 0, is 1\).*--fresh"):
        Shards(tmp_path / "work", {"seed": 1, "judge": "text"})
    Shards(tmp_path / "work", {"seed": 1, "judge": "text"}, fresh=True)
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["arguments.json"]


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "n-00000.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}")
    with pytest.raises(TrainingError, match=r"n-00000.safetensors: cannot be read.*--fresh"):
        Shards(tmp_path, {}).collect("n", [1], _one, lambda _: None)


def _one(piece: Sequence[int], first: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(piece)}


def test_divergence_is_what_changes_the_final_answer() -> None:
    """Every label by hand: the large model alone goes on, and says something else, or not."""
    pair = demo_pair()
    prompts = load_prompts("demo:16", pair.tokenizer, 2).all[:3]
    tensors = R2RTrainer(options(Path("x"), "r2r"))._label(pair, prompts, 0)
    place = divergent = neutral = 0
    for prompt in prompts:
        [answer] = write(pair.large, [prompt.ids], 128, pair.eos_ids)
        for index, token in enumerate(answer):
            small = int(tensors["token"][place])
            label = int(tensors["label"][place])
            if small == token:
                assert label == 0
            else:
                kept = [*answer[:index], small]
                [rest] = write(pair.large, [[*prompt.ids, *kept]], 128, pair.eos_ids)
                assert label == (final_answer(pair.text([*kept, *rest])) != final_answer(pair.text(answer)))
                divergent, neutral = divergent + label, neutral + 1 - label
            place += 1
    assert place == len(tensors["label"])
    assert divergent > 0


def test_citer_tries_what_shortcuts_do_not_decide(tmp_path: Path) -> None:
    """A `completion` in words that neither model would choose: both are wrong at its first place, and the answer decides."""
    pair = demo_pair()
    plain = load_prompts("demo:16", pair.tokenizer, 2).all[:8]
    odd = tuple(pair.tokenizer.encode("Zoe: The answer is 1.", add_special=False))
    prompts = [Prompt(prompt.ids, prompt.answer, odd) for prompt in plain]
    tensors = CiterTrainer(options(Path("x"), "citer")).collect(pair, prompts, Shards(tmp_path, {}), lambda _: None)
    firsts = [tensors["text"].tolist().index(number) for number in range(len(prompts))]
    assert (tensors["shortcut"][firsts] == UNDECIDED).all()
    seen = set()
    for prompt, row in zip(prompts, firsts, strict=True):
        token = int(tensors["token"][row])
        [rest] = write(pair.small, [[*prompt.ids, token]], 128, pair.eos_ids)
        label = bool(tensors["label"][row])
        assert label == is_right(pair.text([token, *rest]), str(prompt.answer))
        seen.add(label)
    assert seen == {True, False}
    assert (tensors["label"] != UNDECIDED).all()
    decided = tensors["shortcut"] != UNDECIDED
    assert torch.equal(tensors["label"][decided], tensors["shortcut"][decided])
    hits = tensors["token"] == tensors["gold"]
    assert (tensors["label"][hits] == 1).all()


def test_rows_are_split_by_question() -> None:
    labels = Labels.of({"text": torch.tensor([0, 0, 1, 2, 2, 3])}, train=2, validation=1)
    assert [part.tolist() for part in (labels.train, labels.validation, labels.held_out)] == [[0, 1, 2], [3, 4], [5]]


def main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["train", "collm", *arguments])
    return code, capsys.readouterr().err


PAIR = ("--small", "builtin:small", "--large", "builtin:large")


USAGE = ("name the pair: --route NAME, or --small", "exclude each other")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((*PAIR, "--prompts", "none.jsonl", "--output", "h"), "--prompts: none.jsonl: No such file"),
        ((*PAIR, "--prompts", "demo", "--output", "no/h"), "--output: no folder no"),
        ((*PAIR, "--prompts", "demo", "--output", "."), "--output: . is a folder"),
        ((*PAIR, "--prompts", "demo:8", "--output", "h", "--max-tokens", "2000"), "lower --max-tokens"),
        (("--small", "x", "--prompts", "demo", "--output", "h"), "name the pair: --route NAME, or --small"),
        (
            ("--small", "x", "--large", "y", "--prompts", "demo", "--output", "h"),
            "models.small.path: no model directory",
        ),
        ((*PAIR, "--route", "demo", "--prompts", "demo", "--output", "h"), "exclude each other"),
        (
            ("--route", "none", "--prompts", "demo", "--output", "h", "-c", "c.toml"),
            "no route 'none'; known: demo, three",
        ),
        (("--route", "three", "--prompts", "demo", "--output", "h", "-c", "c.toml"), "'three' has 1 models; a pair"),
    ],
)
def test_mistakes_of_the_command_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(cli.DEMO_CONFIG + '\n[routes.three]\nmodels = ["small"]\n')
    code, complaint = main(capsys, *arguments)
    assert code == (2 if complaint.startswith("trouterd: error: ") else 78)
    assert ("error: " in complaint) is (problem in USAGE)
    assert problem in complaint
    assert not (tmp_path / "h.work").exists()


@pytest.mark.parametrize("value", ["inf", "nan", "0", "1.5", "many"])
def test_counts_are_whole_numbers(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "collm", *PAIR, "--prompts", "demo", "--output", "h", "--limit", value])
    assert f"argument --limit: expected a positive integer, got '{value}'" in capsys.readouterr().err


def test_models_of_different_vocabularies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_qwen3(tmp_path / "tiny")
    places = ("--small", "builtin:small", "--large", str(other))
    code, complaint = main(capsys, *places, "--prompts", "demo:8", "--output", str(tmp_path / "h"))
    assert code == 78
    assert "the tokenizers of 'small' and 'large' differ: id 3 is" in complaint


def test_nothing_to_learn(tmp_path: Path) -> None:
    """The large model beside itself: no place would be handed over."""
    run = Run(config(small=LARGE_DIRECTORY), "pair", options(tmp_path / "h", "citer"))
    with pytest.raises(TrainingError, match="no row should go to the large model"):
        run.run()


def test_command_prints_report_and_route(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "h.safetensors"
    budget = ("--epochs", "2", "--max-tokens", "128", "--target-share", "0.2")
    assert cli.main(["train", "collm", *PAIR, "--prompts", "demo:8", "--output", str(output), *budget]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed[printed.index("[routes.trained]") :])["routes"]["trained"]["algorithm"] == "collm"
    assert "large alone" in printed
    assert output.is_file()
