"""The dense decoder of the Llama, Qwen2 and Qwen3 families, on token rows, with fused QKV and gate-up weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelConfig
from models.linear import RowPlan, linear, plan_rows
from models.rope import rotary_table, rotate
from models.weights import Checkpoint

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [T, heads, d], k, v [T, kv_heads, d]) -> [T, heads * d]; writes k and v before it reads."""


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[heads + kv_heads, head_dim] the norm weight of each rotated head."""
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Decoder:
    """Weights and forward pass; keeps no state between calls.

    Args:
        directory: a Hugging Face checkpoint directory.
        config: its parsed config.json.
        dtype: of weights and activations; norms, rotations' tables, attention and logits are float32 inside.
        device: where the weights go.
        context_length: positions for which rotations are prepared.
        vocab_size: rows of the LM head to keep: the tokenizer's ids without padding rows.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context_length: int,
        vocab_size: int,
    ) -> None:
        self.config = config
        checkpoint = Checkpoint(directory, config)

        def read(name: str) -> torch.Tensor:
            return checkpoint.read(name, dtype, device)

        self.embedding = read("model.embed_tokens.weight")
        head = self.embedding if config.tied else read("lm_head.weight")
        self.head = head[:vocab_size]
        self.norm = read("model.norm.weight")
        self._layers = [_read_layer(read, config, f"model.layers.{index}.") for index in range(config.num_layers)]
        self._rotations = rotary_table(config.rope, config.head_dim, context_length, dtype).to(device)
        layer = self._layers[0]
        self.plan: RowPlan = plan_rows([layer.qkv, layer.o, layer.gate_up, layer.down])
        self.head_plan: RowPlan = plan_rows([self.head])

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, hidden] after the last layer, before the final norm; T is a padded row count of `plan`."""
        config, eps = self.config, self.config.rms_norm_eps
        rotated = config.q_size + config.kv_size
        cos, sin = self._rotations[positions].unbind(1)
        x = self.embedding[tokens]
        for index, layer in enumerate(self._layers):
            qkv = linear(rms_norm(x, layer.input_norm, eps), layer.qkv, self.plan, layer.qkv_bias)
            qk = qkv[:, :rotated].view(len(x), -1, config.head_dim)
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, eps)
            qk = rotate(qk, cos, sin)
            v = qkv[:, rotated:].view(len(x), -1, config.head_dim)
            attended = attend(index, qk[:, : config.num_heads], qk[:, config.num_heads :], v)
            x = x + linear(attended, layer.o, self.plan, layer.o_bias)
            gate_up = linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up, self.plan, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down, self.plan, layer.down_bias)
        return x

    def logits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits [R, V] and the LM head's input [R, hidden] of rows of `forward`'s result."""
        count = len(x)
        hidden = rms_norm(pad_rows(x, self.head_plan.padded(count)), self.norm, self.config.rms_norm_eps)
        return linear(hidden, self.head, self.head_plan)[:count].float(), hidden[:count]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension (arXiv 1910.07467): float32 inside, cast, then scaled."""
    wide = x.float()
    norm: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), spelt out: torch's own kernel rounds the last elements of a buffer differently on a CPU."""
    wide = x.float()
    return wide.div(torch.exp(-wide).add_(1.0)).to(x.dtype)


def pad_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """x [T, ...] with rows of zeros up to `count`."""
    return x if len(x) == count else torch.cat((x, x.new_zeros(count - len(x), *x.shape[1:])))


def _read_layer(read: Callable[[str], torch.Tensor], config: ModelConfig, prefix: str) -> _Layer:
    def fused(template: str, names: str) -> torch.Tensor:
        return torch.cat([read(prefix + template.format(name)) for name in names.split()])

    qk_norm = None
    if config.qk_norm:
        norms = [read(f"{prefix}self_attn.{name}_norm.weight") for name in "qk"]
        counts = torch.tensor([config.num_heads, config.num_kv_heads], device=norms[0].device)
        qk_norm = torch.stack(norms).repeat_interleave(counts, dim=0)
    return _Layer(
        input_norm=read(f"{prefix}input_layernorm.weight"),
        qkv=fused("self_attn.{}_proj.weight", "q k v"),
        qkv_bias=fused("self_attn.{}_proj.bias", "q k v") if config.qkv_bias else None,
        qk_norm=qk_norm,
        o=read(f"{prefix}self_attn.o_proj.weight"),
        o_bias=read(f"{prefix}self_attn.o_proj.bias") if config.o_bias else None,
        mlp_norm=read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=fused("mlp.{}_proj.weight", "gate up"),
        gate_up_bias=fused("mlp.{}_proj.bias", "gate up") if config.mlp_bias else None,
        down=read(f"{prefix}mlp.down_proj.weight"),
        down_bias=read(f"{prefix}mlp.down_proj.bias") if config.mlp_bias else None,
    )
