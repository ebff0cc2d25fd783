"""A small sequence classifier in a Hugging Face directory, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

WORDS = ("[UNK]", "[PAD]", "sum", "of", "two", "proof", "it", "all")


def tiny_classifier(
    folder: Path, *, labels: int = 3, positions: int = 32, roberta: bool = False
) -> Callable[[str], float]:
    """Write the directory; the score of a text of up to `positions` words, worked out from these."""
    folder.mkdir()
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=WORDS[0], pad_token=WORDS[1])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    # RoBERTa's first position is the one behind the padding id.
    kinds = (
        (XLMRobertaConfig, XLMRobertaForSequenceClassification)
        if roberta
        else (BertConfig, BertForSequenceClassification)
    )
    pad = WORDS.index("[PAD]")
    config = kinds[0](
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=positions + (pad + 1) * roberta,
        pad_token_id=pad,
        num_labels=labels,
        initializer_range=1.0,
    )
    model = kinds[1](config).eval()
    model.save_pretrained(folder)

    def score(text: str) -> float:
        ids = [WORDS.index(word) if word in WORDS else 0 for word in text.split()][:positions]
        with torch.inference_mode():
            return float(model(torch.tensor([ids])).logits[0].softmax(dim=-1)[0])

    return score
