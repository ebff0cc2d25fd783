"""`trouterd check`: mistakes that only the models' and algorithms' own code can see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.r2r_router import save
from models.shape import load_shape
from tests.algorithms.heads import confidence_net, write_confidence, write_defer
from tests.models.foreign import edit_config, tiny_foreign
from trouterd.check import deep_problems, remarks
from trouterd.config import Config, Model, Route
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY


def config(small: Path = SMALL_DIRECTORY, large: Path = LARGE_DIRECTORY, **route: Any) -> Config:
    """The demo pair, with other directories or another route."""
    settings = {"algorithm": "entropy", "params": {"threshold": 0.3}} | route
    return Config(
        models={"small": Model(path=str(small)), "large": Model(path=str(large))},
        routes={"r": Route(models=["small", "large"], **settings)},
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The large model's directory."""
    folder = tmp_path / "copy"
    shutil.copytree(LARGE_DIRECTORY, folder)
    return folder


def test_demo_pair_is_in_order() -> None:
    assert deep_problems(config()) == []


def test_weights_that_are_missing_or_do_not_fit(copy: Path) -> None:
    weights = copy / "model.safetensors"
    shutil.copy(SMALL_DIRECTORY / weights.name, weights)
    (problem,) = deep_problems(config(large=copy))
    assert problem.startswith(f"models.large.path: {weights}: tensor ")
    weights.unlink()
    (problem,) = deep_problems(config(large=copy))
    assert problem.startswith("models.large.path: ")
    assert "model.safetensors" in problem


def test_tokenizers_that_differ_name_both_models(copy: Path) -> None:
    file = copy / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    first, second = (token for token, index in vocabulary.items() if index in (100, 101))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tree))
    (problem,) = deep_problems(config(large=copy))
    assert problem.startswith("routes.r.models: the tokenizers of 'small' and 'large' differ: ")


def test_every_broken_file_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("{}")
    (copy / "tokenizer.json").unlink()
    shape, tokenizer = deep_problems(config(large=copy))
    assert shape.startswith("models.large.path: ")
    assert str(copy / "config.json") in shape
    assert tokenizer.startswith("models.large.path: ")
    assert "tokenizer.json" in tokenizer


@pytest.mark.parametrize(
    ("route", "key"),
    [
        ({"algorithm": "entropie"}, "routes.r.algorithm"),
        ({"params": {"threshold": -1}}, "routes.r.params.threshold"),
        ({"params": {"threshold": 0.3, "treshold": 1}}, "routes.r.params.treshold"),
        ({"params": {}}, "routes.r.params.threshold"),
    ],
)
def test_algorithm_mistakes_name_their_key(route: dict[str, Any], key: str) -> None:
    (problem,) = deep_problems(config(**route))
    assert problem.startswith(f"{key}: ")


def test_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = tmp_path / "head.pth"
    found = config(algorithm="citer", params={"checkpoint": str(checkpoint)})
    assert deep_problems(found) == [f"routes.r.params.checkpoint: no file or directory {checkpoint}"]
    (problem,) = deep_problems(config(algorithm="citer", params={"checkpoint": str(tmp_path / ("x" * 300))}))
    assert problem.endswith("(File name too long)")


HIDDEN = load_shape(SMALL_DIRECTORY).hidden_size


def head_problems(algorithm: str, checkpoint: Path, **params: Any) -> list[str]:
    return deep_problems(config(algorithm=algorithm, params={"checkpoint": str(checkpoint)} | params))


def test_heads_are_opened(tmp_path: Path) -> None:
    head, defer = tmp_path / "head.pth", tmp_path / "defer.safetensors"
    head.touch()
    (problem,) = head_problems("citer", head)
    assert problem.startswith(f"routes.r.params.checkpoint: {head}: not a checkpoint of tensors and plain values")
    write_confidence(head, confidence_net(HIDDEN))
    write_defer(defer, HIDDEN)
    assert (
        head_problems("citer", head) == head_problems("rstitch", head, tau=0.1) == head_problems("collm", defer) == []
    )
    (problem,) = head_problems("collm", head)
    assert problem.startswith(f"routes.r.params.checkpoint: {head}: not a safetensors file")


@pytest.mark.parametrize("algorithm", ["citer", "collm", "r2r"])
def test_a_head_of_another_model_is_named(algorithm: str, tmp_path: Path) -> None:
    head = tmp_path / "head"
    match algorithm:
        case "citer":
            write_confidence(head, confidence_net(HIDDEN + 8))
        case "collm":
            write_defer(head, HIDDEN + 8)
        case "r2r":
            save(head, {}, {"hidden_states_size": HIDDEN + 8, "hidden_dims": [8]}, 0.5, "HiddenStatesClassifier")
    (problem,) = head_problems(algorithm, head)
    assert problem.startswith(f"routes.r.params.checkpoint: {head}: ")
    assert str(HIDDEN + 8) in problem
    assert str(HIDDEN) in problem.replace(str(HIDDEN + 8), "")


def test_what_the_api_scores_prompts_by_is_opened_too(tmp_path: Path) -> None:
    (problem,) = head_problems("query", tmp_path, source="classifier", threshold=0.5)
    assert (
        problem == f"routes.r.params: checkpoint: {tmp_path}: no config.json; expected a Hugging Face model directory"
    )


def test_a_model_without_a_row_for_deferring_needs_a_file() -> None:
    (problem,) = deep_problems(config(algorithm="collm", params={}))
    assert problem.startswith("routes.r.params.checkpoint: set it to a file with defer.weight: model 'small' has no")


def test_script_file(tmp_path: Path) -> None:
    script = tmp_path / "s.json"
    script.write_text('{"vocab_size": "many"}')
    models = {"s": Model(path=str(script), format="script", tokenizer=str(SMALL_DIRECTORY))}
    (problem,) = deep_problems(Config(models=models))
    assert problem.startswith("models.s.path: ")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"context_length": 5000}, "models.small.context_length: 5000, but the model takes at most 1024"),
        ({"kv_tokens": 1}, "models.small.kv_tokens: 0 pages of 16 tokens cannot hold one context of 1024"),
        ({"kv_tokens": 1023}, "models.small.kv_tokens: 63 pages of 16 tokens cannot hold one context of 1024"),
        ({"page_size": 1 << 16}, "models.small.kv_bytes: 0 pages of 65536 tokens cannot hold"),
    ],
)
def test_sizes_that_do_not_fit(settings: dict[str, int], problem: str) -> None:
    model = Model(path=str(SMALL_DIRECTORY), **settings)  # type: ignore[arg-type]
    (found,) = deep_problems(Config(models={"small": model}))
    assert found.startswith(problem)


def test_script_with_too_little_room(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text('{"vocab_size": 4, "eos": 3, "num_pages": 2}')
    model = Model(path=str(file), format="script", tokenizer=str(SMALL_DIRECTORY))
    (problem,) = deep_problems(Config(models={"s": model}))
    assert problem.startswith("models.s.path: num_pages: 2 pages of 16 tokens cannot hold one context of 4096")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")
def test_device_that_is_not_there() -> None:
    models = {"small": Model(path=str(SMALL_DIRECTORY), device="cuda:0")}
    (problem,) = deep_problems(Config(models=models))
    assert problem.startswith("models.small.device: cuda:0, but this host")


def test_models_of_transformers(tmp_path: Path) -> None:
    directory = tiny_foreign(tmp_path, "starcoder2", sliding_window=64)
    found = Config(models={"code": Model(path=str(directory))})
    assert deep_problems(found) == []
    assert remarks(config()) == []
    slower, bound = remarks(found)
    assert slower == "models.code: 'starcoder2' is served by transformers' modelling code, which is slower than our own"
    assert bound == "models.code: its context is 64: sliding_window of its config.json ends there"
    (directory / "model.safetensors").unlink()
    (problem,) = deep_problems(found)
    assert problem.startswith(f"models.code.path: {directory}: neither model.safetensors nor ")
    edit_config(directory, model_type="mamba", architectures=["MambaForCausalLM"])
    (problem,) = deep_problems(found)
    assert "model_type: 'mamba' is recurrent" in problem
    assert remarks(found) == []
