"""Trained scores of prompts against their definitions, and files that are not what they should be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from algorithms.prompt_scores import Classifier, MatrixFactorization
from algorithms.registry import AlgorithmError
from tests.algorithms.classifiers import tiny_classifier

MODELS, WIDTH, EMBEDDING = 64, 8, 24


def factors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "P.weight": torch.randn(MODELS, WIDTH, generator=generator) * 3,
        "text_proj.0.weight": torch.randn(WIDTH, EMBEDDING, generator=generator),
        "classifier.0.weight": torch.randn(1, WIDTH, generator=generator),
    }


def by_definition(state: dict[str, torch.Tensor], embedding: list[float], strong: int, weak: int) -> float:
    projected = [
        math.fsum(w * e for w, e in zip(row, embedding, strict=True)) for row in state["text_proj.0.weight"].tolist()
    ]
    worth = []
    for model in (strong, weak):
        row = state["P.weight"][model].tolist()
        length = math.sqrt(math.fsum(value**2 for value in row))
        weights = state["classifier.0.weight"][0].tolist()
        worth.append(math.fsum(c * p / length * x for c, p, x in zip(weights, row, projected, strict=True)))
    return 1 / (1 + math.exp(worth[1] - worth[0]))


@pytest.mark.parametrize("form", ["weights.safetensors", "weights.pt", "model.safetensors", "pytorch_model.bin"])
def test_matrix_factorisation(form: str, tmp_path: Path) -> None:
    """A file, or a directory that holds one of the usual name."""
    state, path = factors(), tmp_path / form
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    model = MatrixFactorization(path if "weights" in form else tmp_path)
    embedding = torch.randn(EMBEDDING, generator=torch.Generator().manual_seed(5)).tolist()
    for strong, weak in ((24, 36), (36, 24), (0, 63), (7, 7)):
        assert model(embedding, strong, weak) == pytest.approx(by_definition(state, embedding, strong, weak), abs=1e-9)
    assert model(embedding) == model(embedding, 24, 36)
    for arguments, message in [
        ((embedding[:-1],), "embedding: 23 numbers, 24 are needed"),
        ((embedding, 64, 0), "strong: row 64, but there are 64 models"),
        (([1.7e308, -1.7e308] * (EMBEDDING // 2),), "embedding: its numbers are too large"),
        ((embedding, 0, 99), "weak: row 99"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(*arguments)


def test_factors_that_do_not_fit(tmp_path: Path) -> None:
    wrong = {
        "P.weight: missing": {"P.weight": None},
        "text_proj.0.weight: missing, or no matrix": {"text_proj.0.weight": torch.ones(3)},
        r"text_proj.0.weight: has shape \(9, 24\), \(8, 24\) is needed": {
            "text_proj.0.weight": torch.ones(9, EMBEDDING)
        },
        "classifier.0.weight: has shape": {"classifier.0.weight": torch.ones(2, WIDTH)},
        "text_proj.0.bias: unknown tensor": {"text_proj.0.bias": torch.ones(WIDTH)},
    }
    path = tmp_path / "mf.safetensors"
    for message, change in wrong.items():
        save_file({name: tensor for name, tensor in (factors() | change).items() if tensor is not None}, path)
        with pytest.raises(AlgorithmError, match=f"checkpoint: .*mf.safetensors: {message}"):
            MatrixFactorization(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(AlgorithmError, match=r"checkpoint: .*mf.safetensors: "):
        MatrixFactorization(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AlgorithmError, match=r"empty: no model.safetensors or pytorch_model.bin"):
        MatrixFactorization(tmp_path / "empty")


@pytest.mark.parametrize("roberta", [False, True])
def test_classifier(roberta: bool, tmp_path: Path) -> None:
    expected = tiny_classifier(tmp_path / "bert", positions=8, roberta=roberta)
    classifier = Classifier(tmp_path / "bert")
    texts = ["sum of two", "proof of it", "all of it all", "unknown", "proof " * 8]
    for text in texts:
        assert classifier(text) == pytest.approx(expected(text), abs=1e-6)
    assert len({round(classifier(text), 4) for text in texts}) == len(texts)
    assert classifier("proof " * 99) == classifier("proof " * 8)


def test_classifiers_that_do_not_fit(tmp_path: Path) -> None:
    tiny_classifier(tmp_path / "two", labels=2)
    with pytest.raises(AlgorithmError, match=r"checkpoint: .*two: config.json: 2 labels, 3 are needed"):
        Classifier(tmp_path / "two")
    tiny_classifier(tmp_path / "nan")
    weights = tmp_path / "nan" / "model.safetensors"
    state = load_file(weights)
    save_file(state | {"classifier.bias": state["classifier.bias"] * math.nan}, weights, {"format": "pt"})
    with pytest.raises(AlgorithmError, match=r"checkpoint: .*nan: classifier.bias: holds values that are not finite"):
        Classifier(tmp_path / "nan")
    tiny_classifier(tmp_path / "part")
    weights = tmp_path / "part" / "model.safetensors"
    state = load_file(weights)
    del state["classifier.weight"]
    save_file(state, weights, {"format": "pt"})
    with pytest.raises(AlgorithmError, match=r"checkpoint: .*part: classifier.weight: missing \(1 in all\)"):
        Classifier(tmp_path / "part")
    weights.unlink()
    with pytest.raises(AlgorithmError, match=r"checkpoint: .*part: "):
        Classifier(tmp_path / "part")
    weights.write_bytes(b"nothing of the kind")
    with pytest.raises(AlgorithmError, match=r"checkpoint: .*part: "):
        Classifier(tmp_path / "part")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"model_type": "bert", "hidden_size": "wide"}'),
        ("config.json", '{"model_type": "bert", "auto_map": {"AutoConfig": "code.Config"}, "num_labels": 2}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"added_tokens": [], "model": 7}'),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_damaged_files_of_a_classifier(file: str, content: str, tmp_path: Path) -> None:
    """One line that names the directory, whatever transformers and tokenizers raise; its code is never asked for."""
    tiny_classifier(tmp_path / "bert")
    (tmp_path / "bert" / file).write_text(content)
    with pytest.raises(AlgorithmError, match=r"\Acheckpoint: \S*bert: .+\Z"):
        Classifier(tmp_path / "bert")
