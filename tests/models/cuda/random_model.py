"""Random models of real shapes on a GPU, and what they should compute: a dense float32 oracle without any cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.config import ModelConfig, RopeConfig
from models.cuda.packed_weights import MatrixKind, PackedWeights
from models.rope import rotary_table, rotate


def shape(
    family: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    vocab: int = 151_936,
    **changes: bool,
) -> ModelConfig:
    """A model's config."""
    settings = {"tied": False, "qkv_bias": family == "qwen2", "o_bias": False, "mlp_bias": False} | changes
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=40_960,
        rms_norm_eps=1e-6,
        qk_norm=family == "qwen3",
        rope=RopeConfig("default", 1_000_000.0),
        dtype="bfloat16",
        **settings,
    )


class RandomModel:
    """Plain bfloat16 weights, and `forward` over whole sequences in float32."""

    def __init__(self, config: ModelConfig, vocab_size: int, device: torch.device) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        hidden, ffn, d = config.hidden_size, config.intermediate_size, config.head_dim
        self.embedding = self._random(config.vocab_size, hidden)
        self.head = self._random(vocab_size, hidden)
        self.final_norm = self._norm(hidden)
        sizes: dict[MatrixKind, tuple[int, int]] = {
            "qkv": (config.q_size + 2 * config.kv_size, hidden),
            "o": (hidden, config.q_size),
            "gate_up": (2 * ffn, hidden),
            "down": (hidden, ffn),
        }
        biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
        self.layers = [
            {
                "input_norm": self._norm(hidden),
                "mlp_norm": self._norm(hidden),
                "qk_norm": torch.stack((self._norm(d), self._norm(d))) if config.qk_norm else None,
                "matrices": {kind: self._random(*size) for kind, size in sizes.items()},
                "biases": {kind: 0.1 * self._random(size[0], 1)[:, 0] for kind, size in sizes.items() if biased[kind]},
            }
            for _ in range(config.num_layers)
        ]

    def pack(self, grid: int) -> PackedWeights:
        """The same weights for the megakernel."""
        weights = PackedWeights(self.config, vocab_size=self.vocab_size, grid=grid, device=self.device)
        for index, layer in enumerate(self.layers):
            weights.put_layer(index, **layer)
        weights.put_ends(self.embedding, self.final_norm, self.head)
        return weights

    def forward(self, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states after the last token of each sequence, computed in `dtype`."""
        hidden = torch.cat([self._sequence(list(sequence), dtype)[-1:] for sequence in sequences])
        return (hidden @ self.head.to(dtype).t()).float(), hidden

    def _sequence(self, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
        config, d = self.config, self.config.head_dim
        x = self.embedding[tokens].to(dtype)
        cos, sin = rotary_table(config.rope, d, len(tokens), torch.float32).to(self.device).unbind(1)
        for layer in self.layers:
            matrices = {kind: matrix.to(dtype) for kind, matrix in layer["matrices"].items()}
            biases = {kind: bias.to(dtype) for kind, bias in layer["biases"].items()}

            def product(y: torch.Tensor, kind: str, matrices=matrices, biases=biases) -> torch.Tensor:
                return torch.nn.functional.linear(y, matrices[kind], biases.get(kind))

            qkv = product(self._rms(x, layer["input_norm"]), "qkv").view(len(tokens), -1, d)
            q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
            if layer["qk_norm"] is not None:
                q, k = self._rms(q, layer["qk_norm"][0]), self._rms(k, layer["qk_norm"][1])
            q, k = (rotate(y.float(), cos, sin).to(dtype) for y in (q, k))
            attended = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
            )
            x = x + product(attended.transpose(0, 1).flatten(1), "o")
            gate, up = product(self._rms(x, layer["mlp_norm"]), "gate_up").chunk(2, dim=-1)
            x = x + product(torch.nn.functional.silu(gate) * up, "down")
        return self._rms(x, self.final_norm)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight.to(x.dtype)

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        noise = torch.randn(rows, columns, device=self.device, generator=self._generator, dtype=torch.bfloat16)
        return noise * max(columns, 16) ** -0.5

    def _norm(self, size: int) -> torch.Tensor:
        noise = torch.randn(size, device=self.device, generator=self._generator)
        return (1 + 0.1 * noise).to(torch.bfloat16)
