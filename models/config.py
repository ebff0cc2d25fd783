"""What a checkpoint directory says about its model, read from config.json without weights and without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FAMILIES = ("llama", "qwen2", "qwen3")


class ModelError(ValueError):
    """A checkpoint or tokenizer cannot be used; the one-line message names the file and the field or tensor."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear, llama3 or yarn; fields of other kinds are unused."""

    kind: str
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of a dense decoder of the Llama, Qwen2 or Qwen3 family."""

    family: str
    vocab_size: int
    """Rows of the embedding, which may be more than the tokenizer has ids."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tied: bool
    """The LM head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str
    """The dtype that the checkpoint declares: what "auto" means."""

    @property
    def q_size(self) -> int:
        """Width of all query heads; differs from hidden_size in Qwen3."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V of one token in every layer."""
        return 2 * self.num_layers * self.kv_size * element_size

    def parameters(self) -> int:
        """Number of weights, a tied LM head counted once."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        attention = hidden * (2 * self.q_size + 2 * self.kv_size)
        attention += (self.q_size + 2 * self.kv_size) * self.qkv_bias + hidden * self.o_bias
        mlp = 3 * hidden * ffn + (2 * ffn + hidden) * self.mlp_bias
        layer = attention + mlp + 2 * hidden + 2 * self.head_dim * self.qk_norm
        return self.num_layers * layer + hidden + self.vocab_size * hidden * (1 if self.tied else 2)

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read `directory`/config.json. Raises ModelError."""
        return _parse(_Fields.load(Path(directory) / "config.json"))


class Sizes(Protocol):
    """What every kind of model's shape says of its size."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...


def served(shape: Sizes, directory: Path, vocab_size: int | None, context_length: int | None) -> tuple[int, int]:
    """Ids and positions to serve of the model in `directory`; None takes all of them, more raise ModelError."""
    context = shape.context_length if context_length is None else context_length
    if context > shape.context_length:
        raise ModelError(f"{directory}: context_length {context} is over the model's {shape.context_length}")
    ids = shape.vocab_size if vocab_size is None else vocab_size
    if ids > shape.vocab_size:
        raise ModelError(f"{directory}: the tokenizer has {ids} ids, the model only {shape.vocab_size} embeddings")
    return ids, context


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return content


class _Fields:
    """Typed access to one JSON object; errors name the file and the field."""

    def __init__(self, path: Path, content: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.content = content
        self.prefix = prefix

    @classmethod
    def load(cls, path: Path) -> _Fields:
        return cls(path, read_json(path))

    def error(self, field: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self.prefix}{field}: {problem}")

    def has(self, field: str) -> bool:
        return self.content.get(field) is not None

    def number(self, field: str, default: float | None = None) -> float:
        value = self.content.get(field)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(field, f"must be a positive number, not {value!r}")
        return float(value)

    def count(self, field: str, default: int | None = None) -> int:
        value = self.number(field, default)
        if value != int(value):
            raise self.error(field, f"must be a whole number, not {value!r}")
        return int(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.content.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {value!r}")
        return value

    def text(self, field: str, default: str) -> str:
        value = self.content.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, not {value!r}")
        return value

    def object(self, field: str) -> _Fields:
        value = self.content.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, not {value!r}")
        return _Fields(self.path, value, f"{self.prefix}{field}.")


def _parse(fields: _Fields) -> ModelConfig:
    family = fields.text("model_type", "")
    _refuse_what_is_not_implemented(fields, family)
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    # What transformers assumes when a field is absent, which differs between the families.
    kv_heads = fields.count("num_key_value_heads", heads if family == "llama" else min(32, heads))
    head_dim = fields.count("head_dim", 128 if family == "qwen3" else hidden // heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embeddings, not {head_dim}")
    context = fields.count("max_position_embeddings")
    rope = _parse_rope(fields, context)
    bias = fields.flag("attention_bias", default=False)
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        # YaRN checkpoints often keep the context of their pre-training in max_position_embeddings.
        context_length=max(context, int(rope.original_context * rope.factor)) if rope.kind == "yarn" else context,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=family == "qwen2" or bias,
        o_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", default=False),
        qk_norm=family == "qwen3",
        rope=rope,
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
    )


def _refuse_what_is_not_implemented(fields: _Fields, family: str) -> None:
    if family not in FAMILIES:
        raise fields.error("model_type", f"{family!r} is not supported; supported are {', '.join(FAMILIES)}")
    architectures = fields.content.get("architectures")
    if isinstance(architectures, list) and architectures and not any("ForCausalLM" in str(a) for a in architectures):
        raise fields.error("architectures", f"{architectures[0]} is not a language model (…ForCausalLM)")
    if fields.has("quantization_config"):
        method = fields.object("quantization_config").content.get("quant_method", "unknown")
        raise fields.error("quantization_config", f"quantised weights ({method}) are not supported; use the originals")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"{fields.content['hidden_act']!r} is not supported, only 'silu'")
    if _slides(fields):
        raise fields.error("sliding_window", "sliding-window attention is in use and not supported")


def _slides(fields: _Fields) -> bool:
    kinds = fields.content.get("layer_types")
    if isinstance(kinds, list):
        return any(kind != "full_attention" for kind in kinds)
    if not fields.flag("use_sliding_window", default=False) or not fields.has("sliding_window"):
        return False
    return fields.count("num_hidden_layers") > float(fields.content.get("max_window_layers", 28))


def _parse_rope(fields: _Fields, context: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or from `rope_scaling` and `rope_theta` at the top (before)."""
    rope = fields.object("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if any(isinstance(value, dict) for value in rope.content.values()):
        raise fields.error(rope.prefix.rstrip("."), "rotary parameters per layer type are not supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    for part in (rope, fields):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            raise part.error("partial_rotary_factor", "only full rotary embeddings (1.0) are supported")
    original = rope.count("original_max_position_embeddings", context)
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "linear":
        return RopeConfig(kind, theta, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            factor=rope.number("factor"),
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(
            kind,
            theta,
            factor=rope.number("factor"),
            original_context=original,
            attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number("mscale", 0.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0),
            truncate=rope.flag("truncate", default=True),
        )
    raise rope.error("rope_type", f"{kind!r} is not supported; supported are default, linear, llama3, yarn")
