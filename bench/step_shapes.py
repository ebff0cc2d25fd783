"""Published shapes of models, as directories that hold a config.json and nothing else: for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# hidden, feed-forward, layers, heads, key and value heads, tied: from the models' published config.json.
_QWEN3 = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False),
}
SHAPES = tuple(_QWEN3)


def write_shape(name: str, directory: Path, layers: int | None = None) -> Path:
    """Write config.json of a shape; `layers` cuts it, for smoke tests. Returns the directory."""
    hidden, ffn, depth, heads, kv_heads, tied = _QWEN3[name]
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers or depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tied,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "dtype": "bfloat16",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory
