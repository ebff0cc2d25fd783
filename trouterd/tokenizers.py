"""The tokenizers of a configuration's models, for the processes that need all of them."""

from __future__ import annotations

from pathlib import Path

from models.tokenizer import Tokenizer
from trouterd.config import Config


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """One per model; models that name the same directory share it.

    Raises:
        ModelError: naming the file.
    """
    by_folder: dict[str, Tokenizer] = {}
    tokenizers = {}
    for name, model in config.models.items():
        folder = model.tokenizer_folder
        if folder not in by_folder:
            by_folder[folder] = Tokenizer.load(Path(folder))
        tokenizers[name] = by_folder[folder]
    return tokenizers
