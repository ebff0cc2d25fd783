"""Tiny random models as complete Hugging Face directories, for tests of every package.

    directory = tiny_qwen3(tmp_path)                 # 2 layers, ByteTok, random weights: loads in milliseconds
    directory = tiny_llama(tmp_path / "b", seed=1, rope={"rope_type": "llama3", ...}, tied=False)
    directory = byte_tokenizer(tmp_path / "tok")     # tokenizer files alone, for script models

ByteTok: ids 0-255 are bytes, 256 is BOS "<s>", 257 EOS "</s>". The tokenizer adds BOS; the chat template begins with
BOS too (`template_bos`) and wraps each user text as `<u>...</u><a>`. Weights are scaled so that next-token laws are
peaked and differ from position to position; equal arguments give equal bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from models.config import ModelConfig
from models.weights import expected_tensors

BOS, EOS = 256, 257
VOCAB = 260
"""Rows of the embedding: two more than ByteTok has ids, as padded models do."""


def byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable stand-in of each byte -> byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + place): byte for place, byte in enumerate(moved)}


def byte_tokenizer(
    directory: Path, *, add_bos: bool = True, template_bos: bool = True, extra: tuple[str, ...] = ()
) -> Path:
    """Write ByteTok's files; `extra` are further special tokens from id 258 on."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", *extra)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        ("{{ bos_token }}" if template_bos else "")
        + "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}</u><a>"
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def tiny_qwen3(directory: Path, **changes: Any) -> Path:
    """Qwen3: q_norm and k_norm, no biases. `changes` are those of `tiny_model`."""
    return tiny_model(directory, "qwen3", **changes)


def tiny_qwen2(directory: Path, **changes: Any) -> Path:
    """Qwen2: biases on q, k, v. `changes` are those of `tiny_model`."""
    return tiny_model(directory, "qwen2", **changes)


def tiny_llama(directory: Path, **changes: Any) -> Path:
    """Llama: neither norms on heads nor biases. `changes` are those of `tiny_model`."""
    return tiny_model(directory, "llama", **changes)


def tiny_model(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    vocab: int = VOCAB,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 48,
    context: int = 512,
    tied: bool = True,
    rope: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    eos: int | list[int] = EOS,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write config.json, generation_config.json, model.safetensors and ByteTok; returns the directory.

    Args:
        directory: made when missing.
        family: "qwen3", "qwen2" or "llama".
        rope: `rope_parameters` of config.json; default theta 10,000 without scaling.
        eos: goes to config.json and generation_config.json.
        config: further fields of config.json, overriding all others.
    """
    if tokenizer:
        byte_tokenizer(directory)
    directory.mkdir(parents=True, exist_ok=True)
    names = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    settings: dict[str, Any] = {
        "architectures": [names[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": eos,
        "dtype": str(dtype).removeprefix("torch."),
    } | config
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": eos}))
    shapes = dict(expected_tensors(ModelConfig.load(directory)))
    save_file(random_tensors(shapes, seed, dtype), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Norms near 1, matrices scaled by their fan-in; large enough for peaked laws, with soft attention."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            noise = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
        else:
            noise *= (1 if "q_proj" in name or "k_proj" in name else 3) * shape[-1] ** -0.5
        tensors[name] = noise.to(dtype)
    return tensors
