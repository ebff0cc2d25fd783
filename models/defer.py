"""The deferral row of a model of Co-LLM (arXiv 2403.03870): one more, last row of its LM head, for one more, last token.

Everything else here takes such a checkpoint as if it ended before that row: it is neither sampled nor fed. Only this file reads it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from models.config import ModelError, read_json
from models.tokenizer import DEFER_TOKEN, defer_id
from models.weights import locate, read_row

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def defer_row(directory: Path) -> torch.Tensor | None:
    """[H] float32 row of a checkpoint, on the host; None for a model without one. Raises ModelError."""
    token = defer_id(directory)
    if token is None:
        return None
    files = locate(directory)
    tied = read_json(directory / "config.json").get("tie_word_embeddings")
    names = (_EMBEDDING, _HEAD) if tied else (_HEAD, _EMBEDDING)
    name = next((name for name in names if name in files), None)
    if name is None:
        raise ModelError(
            f"{directory}: neither {_HEAD} nor {_EMBEDDING} is there, where the row of {DEFER_TOKEN} would be"
        )
    return read_row(files[name], name, token)
