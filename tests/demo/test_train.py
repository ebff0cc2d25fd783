import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.demo import train as recipe
from trouterd.demo.tokenizer import train_tokenizer

Train = Callable[..., None]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Runs the command line for two steps of tiny models, with the committed tokenizer instead of a newly trained one."""
    tokenizer = Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
    monkeypatch.setattr(recipe, "train_tokenizer", lambda texts, vocabulary: tokenizer)
    for name, layers in (("SMALL", 1), ("LARGE", 2)):
        tiny = {"hidden": 64, "layers": layers, "heads": 1, "kv_heads": 1, "feed_forward": 64, "steps": 2, "batch": 8}
        monkeypatch.setattr(recipe, name, replace(getattr(recipe, name), **tiny))
    monkeypatch.setattr(recipe, "SMALL_RANGE", (0.0, 1.0))
    monkeypatch.setattr(recipe, "CHECK_PROBLEMS", 2)
    monkeypatch.setattr("trouterd.demo.report.ANSWER_LIMIT", 8)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)

    def run(out: Path, *options: str) -> None:
        arguments = ["train", "--out", str(out), "--device", "cpu", "--rows", "100", "--problems", "2", *options]
        monkeypatch.setattr("sys.argv", arguments)
        recipe.main()

    yield run
    torch.use_deterministic_algorithms(False)


def files(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_one_model_at_a_time_gives_what_both_at_once_give(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "both")
    train(tmp_path / "parts", "--only", "small")
    assert not (tmp_path / "parts" / "small" / "README.md").exists()
    train(tmp_path / "parts", "--only", "large")
    both = files(tmp_path / "both")
    assert both == files(tmp_path / "parts")
    assert both["small/model.safetensors"] != both["large/model.safetensors"]
    for name, directory in (("small", SMALL_DIRECTORY), ("large", LARGE_DIRECTORY)):
        assert {file.name for file in directory.iterdir()} == {
            file.name for file in (tmp_path / "both" / name).iterdir()
        }
        assert f"the {name} model" in both[f"{name}/README.md"].decode()


def test_a_partner_with_another_tokenizer_is_refused(train: Train, tmp_path: Path) -> None:
    shutil.copytree(LARGE_DIRECTORY, tmp_path / "large")
    train_tokenizer(["abc"], 300).save(str(tmp_path / "large" / "tokenizer.json"))
    with pytest.raises(SystemExit, match=r"large/tokenizer\.json is not the tokenizer of this run"):
        train(tmp_path, "--only", "small")
    assert not (tmp_path / "small").exists()
