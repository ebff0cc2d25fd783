"""Tiny random checkpoints of architectures that only transformers' own code knows.

    directory = tiny_foreign(tmp_path, "gpt_neox")            # config.json, model.safetensors, ByteTok
    directory = tiny_foreign(tmp_path, "starcoder2", sliding_window=64)

Written by transformers itself; matrices are scaled up so that next-token laws are peaked.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.models.tiny import BOS, EOS, VOCAB, byte_tokenizer

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 96},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {"query_pre_attn_scalar": 16},
}


def tiny_foreign(directory: Path, family: str, *, seed: int = 0, tokenizer: bool = True, **changes: Any) -> Path:
    """Write a checkpoint of `model_type` `family`; `changes` are fields of its configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = AutoConfig.for_model(family)
        known = {name: value for name, value in _COMMON.items() if hasattr(usual, name)}
        config = AutoConfig.for_model(family, **known | _OWN.get(family, {}) | changes)
        torch.manual_seed(seed)
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                noise = torch.randn(tensor.shape)
                # Norms keep what they start from, 1 or, where 1 is added to them, 0.
                tensor.copy_(
                    _gain(name) * tensor.shape[-1] ** -0.5 * noise if tensor.dim() > 1 else tensor + 0.1 * noise
                )
        model.save_pretrained(directory)
    if tokenizer:
        byte_tokenizer(directory)
    return directory


def _gain(name: str) -> float:
    """Attention stays soft, everything else is strong: tokens differ from position to position."""
    return 1.0 if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")) else 3.0


def edit_config(directory: Path, **changes: Any) -> Path:
    """Change fields of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with its own attention."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
