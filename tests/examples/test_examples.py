"""examples/*.toml: `trouterd check` takes each of them, with models of the published shapes on H200s that are made up."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from algorithms.registry import load, names
from tests.models.tiny import BOS, EOS, byte_tokenizer
from trouterd import check, cli
from trouterd.memory import GIB
from trouterd.worker.gpu_check import Gpu, Host

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(FOLDER.glob("*.toml"))
H200 = Gpu("NVIDIA H200", (9, 0), 139 * GIB)

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 8, 151936, 40960, True)),
    "Qwen3-8B": ("qwen3", (4096, 12288, 36, 32, 8, 151936, 40960, False)),
    "Qwen3-32B": ("qwen3", (5120, 25600, 64, 64, 8, 151936, 40960, False)),
    "Qwen2-1.5B": ("qwen2", (1536, 8960, 28, 12, 2, 151936, 131072, True)),
    "Qwen2-72B": ("qwen2", (8192, 29568, 80, 64, 8, 152064, 131072, False)),
    "DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", (1536, 8960, 28, 12, 2, 151936, 131072, False)),
    "L1-1.5B-Short": ("qwen2", (1536, 8960, 28, 12, 2, 151936, 131072, False)),
    "DeepSeek-R1-Distill-Qwen-14B": ("qwen2", (5120, 13824, 48, 40, 8, 152064, 131072, False)),
    "DeepSeek-R1-Distill-Qwen-32B": ("qwen2", (5120, 27648, 64, 40, 8, 152064, 131072, False)),
    "Llama-2-7b-collm-gsm8k": ("llama", (4096, 11008, 32, 32, 32, 32002, 4096, False)),
    "Llama-2-70b-hf": ("llama", (8192, 28672, 80, 64, 8, 32000, 4096, False)),
}
"""Family and FIELDS of config.json."""
TOKENIZERS = {"L1": "DeepSeek"}
"""Models that have another one's tokenizer than their name says: first word -> first word."""
DIRECTORIES = ("bert_gpt4_augmented", "mf_gpt4_augmented")
"""Checkpoints that are no files."""


def write_model(directory: Path) -> None:
    """config.json of the published model, and a small tokenizer that differs between families of tokenizers."""
    family, values = SHAPES[directory.name]
    first = directory.name.split("-")[0]
    added = ("<|pad|>", "<|defer|>") if "collm" in directory.name else ()
    byte_tokenizer(directory, extra=(f"<|{TOKENIZERS.get(first, first)}|>", *added))
    shape: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
    shape |= {"model_type": family, "head_dim": 128, "rms_norm_eps": 1e-6, "bos_token_id": BOS, "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(shape | {"rope_theta": 1_000_000.0}))


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the comments tell to download or to train, weights aside."""
    folder = tmp_path_factory.mktemp("downloads")
    for name in SHAPES:
        write_model(folder / "models" / name)
    for route in (route for file in FILES for route in read(file)[1].values()):
        checkpoint = folder / route.get("params", {}).get("checkpoint", "routers")
        if checkpoint.name in DIRECTORIES:
            checkpoint.mkdir(parents=True, exist_ok=True)
        elif checkpoint.suffix:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.touch()
    return folder


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tables of models and routes as they stand in the file, unknown keys included."""
    tree = tomllib.loads(file.read_text())
    return tree["models"], tree["routes"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_check_takes_it(
    file: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models, _ = read(file)
    gpus = max(
        int(model["device"].removeprefix("cuda:")) + model.get("tensor_parallel", 1) for model in models.values()
    )
    assert f"{('One', 'Two')[gpus - 1]} H200" in row(file.name)[-1]
    monkeypatch.setattr(Host, "this", lambda: Host((H200,) * gpus, triton=True))
    # The downloads are empty files; what check makes of real heads is tested with check.
    monkeypatch.setattr(check, "_try_head", lambda *_: None)
    weightless = [part for name in models for part in ("--set", f"models.{name}.load_format=dummy")]
    copy = shutil.copy(file, downloads)
    code = cli.main(["check", "-c", str(copy), *weightless])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert code == cli.EXIT_OK
    # Nothing else: no model falls back to slower code.
    assert printed.out == f"ok: {len(models)} models, 1 route\n"


def row(name: str) -> list[str]:
    """Cells of a file's row in the table."""
    (found,) = re.findall(rf"^\| \[`{re.escape(name)}`\]\({re.escape(name)}\) \| (.*) \|$", table(), re.MULTILINE)
    return found.split(" | ")


def table() -> str:
    return (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_table_says_what_is_in_it(file: Path) -> None:
    models, routes = read(file)
    ((name, route),) = routes.items()
    algorithm, named, papers, _ = row(file.name)
    assert name in (route["algorithm"], file.stem)
    assert algorithm == f"`{route['algorithm']}`"
    assert named == ", ".join(Path(models[model]["path"]).name for model in route["models"])
    assert set(re.findall(r"\d{4}\.\d{5}", papers)) <= set(re.findall(r"\d{4}\.\d{5}", file.read_text()))


def test_table_has_no_other_files() -> None:
    assert sorted(re.findall(r"^\| \[`(.*?\.toml)`\]", table(), re.MULTILINE)) == [file.name for file in FILES]


def test_every_built_in_has_one() -> None:
    routes = [route for file in FILES for route in read(file)[1].values()]
    built_in = {name for name in names() if load(name).params.__module__.startswith("algorithms.")}
    assert built_in == {route["algorithm"] for route in routes}
