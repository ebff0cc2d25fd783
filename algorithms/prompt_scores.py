"""Scores of whole prompts by trained models: how much the strong model is wanted, in [0, 1].

Source: RouteLLM, arXiv 2406.18665, whose checkpoints are read as they are: as tensors, never as code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from algorithms.checkpoint import Tensors, load_mapping, load_safetensors
from algorithms.registry import AlgorithmError
from models.quiet import quiet

_KEY = "checkpoint"
_FILES = ("model.safetensors", "pytorch_model.bin")
_LABELS = 3

STRONG, WEAK = 24, 36
"""Rows of the two models that RouteLLM's own matrix factorisation was trained for."""


class Classifier:
    """A sequence classifier of three labels, in a Hugging Face directory with its tokenizer.

    With p its softmax, the score is 1 - (p[1] + p[2]). Computed in float32 on the CPU; longer texts are cut at the end.
    """

    def __init__(self, path: Path) -> None:
        """Raises AlgorithmError naming the directory and what is wrong with it."""
        # Whose import takes seconds.
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        if not (path / "config.json").is_file():
            raise _error(path, "no config.json; expected a Hugging Face model directory")
        place: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = AutoConfig.from_pretrained(path, **place)
            tokenizer = AutoTokenizer.from_pretrained(path, **place)
            with quiet():
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    path, config=config, dtype=torch.float32, weights_only=True, output_loading_info=True, **place
                )
        except Exception as error:  # of a damaged file; the tokenizer's Rust extension raises nothing narrower
            raise _error(path, f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        if config.num_labels != _LABELS:
            raise _error(path, f"config.json: {config.num_labels} labels, {_LABELS} are needed")
        if missing := sorted(report["missing_keys"]):
            raise _error(path, f"{missing[0]}: missing ({len(missing)} in all)")
        if wrong := [name for name, weight in model.named_parameters() if not weight.isfinite().all()]:
            raise _error(path, f"{wrong[0]}: holds values that are not finite ({len(wrong)} in all)")
        self._tokenizer = tokenizer
        self._model = model.eval()
        self._longest = min(tokenizer.model_max_length, _positions(model))

    def __call__(self, text: str) -> float:
        """The score of a prompt.

        Raises:
            ValueError: a text without any token, where the tokenizer adds none.
        """
        encoded = self._tokenizer(text, truncation=True, max_length=self._longest, return_tensors="pt")
        if not encoded["input_ids"].numel():
            raise ValueError("the text to be scored has no tokens")
        with torch.inference_mode():
            probabilities = self._model(**encoded).logits[0].float().softmax(dim=-1)
        return 1.0 - float(probabilities[1] + probabilities[2])


class MatrixFactorization:
    """Bilinear scores of models for prompts: with e the prompt's embedding and P_m a model's row, scaled to length 1,
    d_m = c (P_m * W e), and the score is sigmoid(d_strong - d_weak).

    Tensors: P.weight [models, D], text_proj.0.weight [D, E], classifier.0.weight [1, D].
    """

    def __init__(self, path: Path) -> None:
        """`path`: a file, or a directory with one. Raises AlgorithmError naming the file and the tensor."""
        file = _weights_in(path)
        state = (load_safetensors if file.suffix == ".safetensors" else load_mapping)(file, _KEY)
        tensors = Tensors(file, _KEY, state)

        def matrix(name: str) -> tuple[int, int]:
            shape = tuple(state[name].shape) if isinstance(state.get(name), torch.Tensor) else ()
            if len(shape) != 2:
                raise tensors.error(f"{name}: missing, or no matrix")
            return shape

        (self.models, width), (_, self.embedding_size) = matrix("P.weight"), matrix("text_proj.0.weight")
        rows = functional.normalize(tensors.take("P.weight", self.models, width), dim=-1)
        project = tensors.take("text_proj.0.weight", width, self.embedding_size)
        weights = rows * tensors.take("classifier.0.weight", 1, width)
        tensors.finish()
        self._projected = weights @ project

    def __call__(self, embedding: Sequence[float], strong: int = STRONG, weak: int = WEAK) -> float:
        """The score of a prompt.

        Raises:
            ValueError: an embedding of another length or beyond all measure, or a row that is not there.
        """
        if len(embedding) != self.embedding_size:
            raise ValueError(f"embedding: {len(embedding)} numbers, {self.embedding_size} are needed")
        self.check_rows(strong, weak)
        difference = (self._projected[strong] - self._projected[weak]) @ torch.tensor(embedding, dtype=torch.float64)
        if not difference.isfinite():
            raise ValueError("embedding: its numbers are too large")
        return float(difference.sigmoid())

    def check_rows(self, strong: int = STRONG, weak: int = WEAK) -> None:
        """Raises ValueError naming a row that is not there."""
        for name, row in (("strong", strong), ("weak", weak)):
            if row >= self.models:
                raise ValueError(f"{name}: row {row}, but there are {self.models} models")


def _weights_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = next((path / name for name in _FILES if (path / name).is_file()), None)
    if found is None:
        raise _error(path, f"no {' or '.join(_FILES)}")
    return found


def _positions(model: Any) -> int:
    """Tokens that a classifier has positions for. Those of the RoBERTa family are counted from behind the padding id."""
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        return table.num_embeddings - table.padding_idx - 1
    return int(getattr(model.config, "max_position_embeddings", 1 << 30))


def _error(path: Path, problem: str) -> AlgorithmError:
    return AlgorithmError(f"{_KEY}: {path}: {problem}", _KEY)
