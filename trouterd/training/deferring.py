"""A small model with a deferral row as transformers knows it, and the Hugging Face directory that routes take it from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from models.config import ModelConfig, read_json
from models.tokenizer import DEFER_TOKEN, defer_id
from models.weights import resolve_dtype
from trouterd.training.faults import TrainingError

_COPIED = ("special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""Files of a tokenizer that stay as they are."""
logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the command shows its own


def load(directory: Path, ids: int, device: torch.device) -> PreTrainedModel:
    """A checkpoint in float32 whose LM head ends after one more row than `ids`; it begins as the mean of the others."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.resize_token_embeddings(ids + 1, mean_resizing=False)
    set_row(model, _head(model).weight[:-1].mean(0))
    torch.nn.Module.to(model, device)
    return model


def row_of(model: PreTrainedModel) -> torch.Tensor:
    """[H] a copy of the row."""
    return _head(model).weight[-1].detach().clone()


@torch.no_grad()
def set_row(model: PreTrainedModel, row: torch.Tensor) -> None:
    """Set the row [H]; an embedding of its own, which is never fed, becomes the same."""
    embedding: Any = model.get_input_embeddings()
    for matrix in (embedding.weight, _head(model).weight):
        matrix[-1] = row


def _head(model: PreTrainedModel) -> torch.nn.Linear:
    head: torch.nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def check_tokenizer(directory: Path) -> None:
    """Raises TrainingError for a tokenizer that cannot get one more token as its last one."""
    if not (directory / "tokenizer.json").exists():
        raise TrainingError(f"--fine-tune: {directory}: has no tokenizer.json to add {DEFER_TOKEN} to")
    if defer_id(directory) is not None:
        raise TrainingError(
            f"--fine-tune: {directory}: has {DEFER_TOKEN} already; give the model that it was made from"
        )


def save(model: PreTrainedModel, source: Path, tokenizer: Path, directory: Path) -> None:
    """Write weights in the dtype of the source, configuration, and the tokenizer with one more special token, its last.

    Args:
        model: as of `load`; it is rounded to that dtype too.
        source: the checkpoint that it was loaded from.
        tokenizer: folder of its tokenizer.
        directory: made if it is not there.

    Raises:
        TrainingError: the tokenizer's ids have a gap, so that its next token is not its last one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, resolve_dtype("auto", ModelConfig.load(source)))
    model.save_pretrained(directory)
    for name in _COPIED:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, directory / name)
    extended = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    extended.add_special_tokens([AddedToken(DEFER_TOKEN, special=True, normalized=False)])
    extended.save(str(directory / "tokenizer.json"))
    _save_settings(tokenizer / "tokenizer_config.json", directory)
    if defer_id(directory) != model.config.vocab_size - 1:
        raise TrainingError(
            f"--fine-tune: {tokenizer}/tokenizer.json: its ids have gaps, {DEFER_TOKEN} is not the last one"
        )


def _save_settings(path: Path, directory: Path) -> None:
    settings = read_json(path) if path.exists() else {}
    lists = ("extra_special_tokens", "additional_special_tokens")
    name = next((name for name in lists if isinstance(settings.get(name), list)), lists[1])
    settings[name] = [*settings.get(name, []), DEFER_TOKEN]
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (directory / path.name).write_text(text, encoding="utf-8")
