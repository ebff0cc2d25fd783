"""Models of Co-LLM: the last token and its row are split off, and everything else is as if they had never been there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ModelError
from models.defer import defer_row
from models.tokenizer import DEFER_TOKEN, Tokenizer, defer_id, vocabulary_size
from models.torch_runner import TorchRunner
from tests.models.tiny import BOS, EOS, byte_tokenizer, tiny_qwen3

PLAIN = 258
"""Ids of ByteTok."""


def deferring(directory: Path, **changes: Any) -> Path:
    """A checkpoint as Co-LLM's training leaves it: one more id, a vocabulary of just that size, its initial row beside it."""
    tiny_qwen3(directory, **({"vocab": PLAIN + 1} | changes))
    byte_tokenizer(directory, extra=(DEFER_TOKEN,))
    settings = directory / "tokenizer_config.json"
    content = json.loads(settings.read_text()) | {"additional_special_tokens": [DEFER_TOKEN]}
    settings.write_text(json.dumps(content))
    torch.save(torch.zeros(1, 32), directory / "gperp_init.bin")
    return directory


def test_the_tokenizer_is_that_of_a_peer_without_the_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(deferring(tmp_path / "small"))
    peer = Tokenizer.load(byte_tokenizer(tmp_path / "large"))
    assert tokenizer.first_difference(peer) is None
    assert tokenizer.vocab_size == vocabulary_size(tmp_path / "small") == PLAIN
    assert tokenizer.special_ids == {BOS, EOS}
    text = f"a{DEFER_TOKEN}b"
    assert tokenizer.encode(text) == peer.encode(text) == [BOS, *text.encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (defer_id(tmp_path / "small"), defer_id(tmp_path / "large")) == (PLAIN, None)
    assert defer_row(tmp_path / "large") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_row(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    directory = deferring(tmp_path, tied=tied, dtype=dtype)
    row = defer_row(directory)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert row is not None
    assert torch.equal(row, load_file(directory / "model.safetensors")[name][PLAIN].float())
    runner = TorchRunner.load(directory, num_pages=1, page_size=16, vocab_size=vocabulary_size(directory))
    assert runner.vocab_size == PLAIN


def test_a_tied_models_second_head_is_not_read(tmp_path: Path) -> None:
    directory = deferring(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(PLAIN + 1, 32)}, directory / "model.safetensors")
    row = defer_row(directory)
    assert row is not None
    assert row.abs().sum() > 0


def test_a_slow_tokenizers_added_token(tmp_path: Path) -> None:
    """Without a tokenizer.json the id stands in added_tokens.json."""
    directory = deferring(tmp_path)
    (directory / "tokenizer.json").unlink()
    assert defer_id(directory) is None
    (directory / "added_tokens.json").write_text(json.dumps({DEFER_TOKEN: PLAIN}))
    row = defer_row(directory)
    assert row is not None
    assert torch.equal(row, load_file(directory / "model.safetensors")["model.embed_tokens.weight"][PLAIN])


def test_what_cannot_be_split_off(tmp_path: Path) -> None:
    directory = deferring(tmp_path)
    byte_tokenizer(directory, extra=(DEFER_TOKEN, "<x>"))
    for read in (Tokenizer.load, vocabulary_size, defer_row):
        with pytest.raises(ModelError, match=r"<\|defer\|> has id 258; only the last id can be split off"):
            read(directory)
    byte_tokenizer(directory, extra=("<x>", DEFER_TOKEN))
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight has shape \(259, 32\); row 259 is needed"):
        defer_row(directory)
    save_file({"x": torch.zeros(1)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"neither lm_head\.weight nor model\.embed_tokens\.weight is there"):
        defer_row(directory)
