"""A tokenizer of any size without files from elsewhere: bytes first, then words that no text contains."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

QWEN3_IDS = 151_669
"""Ids of Qwen3's tokenizer."""


def write_tokenizer(directory: Path, ids: int = QWEN3_IDS) -> Path:
    """Write a byte-level tokenizer whose ids from 257 on decode to words; the last id ends answers. Returns the directory.

    Args:
        directory: made if it is not there.
        ids: how many ids it has, at least 257.
    """
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary |= {f"w{number}Ġ": number for number in range(len(alphabet) + 1, ids)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
