"""The reference model runner: a dense decoder in plain torch over paged KV, on a CPU or any torch device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from models.attention import PagedAttention
from models.batch import Batch, IntArray, StepOutput
from models.config import ModelConfig, served
from models.decoder import Decoder
from models.weights import resolve_dtype


class TorchRunner:
    """ModelRunner whose rows depend on nothing but their own request, bit for bit.

    The guarantee holds for the thread count (`torch.set_num_threads`) under which the runner was loaded.
    """

    inline = False

    def __init__(self, decoder: Decoder, attention: PagedAttention, *, num_pages: int, context_length: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self.config = decoder.config
        self.device = attention.device
        self.dtype = decoder.embedding.dtype
        self.vocab_size = len(decoder.head)
        self.hidden_size = decoder.config.hidden_size
        self.embedding: torch.Tensor | None = decoder.embedding
        self.context_length = context_length
        self.page_size = attention.page_size
        self.num_pages = num_pages

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        num_pages: int,
        page_size: int,
        vocab_size: int | None = None,
        context_length: int | None = None,
    ) -> TorchRunner:
        """Read a Hugging Face directory.

        Args:
            path: directory with config.json and safetensors weights.
            device: torch device.
            dtype: "float32", "bfloat16" or "auto".
            num_pages: pages of the KV pool.
            page_size: tokens per page.
            vocab_size: the tokenizer's number of ids; None keeps every row of the LM head.
            context_length: longest sequence served; None takes the model's own, a larger one is refused.

        Raises:
            ModelError: naming the file and what is wrong with it.
        """
        directory = Path(path)
        config = ModelConfig.load(directory)
        ids, context = served(config, directory, vocab_size, context_length)
        kind, place = resolve_dtype(dtype, config), torch.device(device)
        with torch.no_grad():
            decoder = Decoder(directory, config, dtype=kind, device=place, context_length=context, vocab_size=ids)
            attention = PagedAttention(
                layers=config.num_layers,
                num_pages=num_pages,
                page_size=page_size,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=kind,
                device=place,
            )
        return cls(decoder, attention, num_pages=num_pages, context_length=context)

    def allocate_kv(self, num_pages: int) -> None:
        """A KV pool of another size; what the old one held is gone."""
        self._attention.resize(num_pages)
        self.num_pages = num_pages

    def step(self, batch: Batch) -> StepOutput:
        """Feed the rows, write their K and V, return logits and hidden states of the wanted rows."""
        with torch.inference_mode():
            padding = self._decoder.plan.padded(len(batch)) - len(batch)
            x = self._decoder.forward(
                self._padded(batch.tokens, padding),
                self._padded(batch.positions, padding),
                self._attention.prepare(batch),
            )
            logits, hidden = self._decoder.logits(x[torch.from_numpy(batch.logit_rows).to(self.device)])
        return StepOutput(logits=logits, hidden=hidden)

    def _padded(self, values: IntArray, padding: int) -> torch.Tensor:
        return torch.from_numpy(np.pad(values, (0, padding))).to(self.device)
