"""config.json of the families, old and new spellings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig, ModelError
from tests.models.tiny import tiny_llama, tiny_model, tiny_qwen2, tiny_qwen3


def load(directory: Path, **changes: Any) -> ModelConfig:
    """Config of a directory after changes; None removes a field."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return ModelConfig.load(directory)


def test_families(tmp_path: Path) -> None:
    qwen3 = ModelConfig.load(tiny_qwen3(tmp_path / "3"))
    qwen2 = ModelConfig.load(tiny_qwen2(tmp_path / "2"))
    llama = ModelConfig.load(tiny_llama(tmp_path / "l", tied=False, attention_bias=True))
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias, qwen3.tied) == (True, False, False, True)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias) == (False, True, False)
    assert (llama.qk_norm, llama.qkv_bias, llama.o_bias, llama.tied) == (False, True, True, False)
    assert (qwen3.q_size, qwen3.kv_size) == (64, 32)
    assert qwen3.kv_bytes_per_token(4) == 2 * 2 * 32 * 4


def test_published_parameter_count(tmp_path: Path) -> None:
    config = load(
        tiny_qwen3(tmp_path),
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    assert config.parameters() == 596_049_920
    assert config.kv_bytes_per_token(2) == 114_688


def test_old_spelling_of_rotary_parameters(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = load(tiny_qwen2(tmp_path), rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("yarn", 5e5, 4.0)
    assert config.context_length == 2048


def test_no_rotary_parameters_at_all(tmp_path: Path) -> None:
    config = load(tiny_llama(tmp_path), rope_parameters=None)
    assert (config.rope.kind, config.rope.theta) == ("default", 10_000.0)


def test_defaults_of_absent_fields(tmp_path: Path) -> None:
    config = load(tiny_llama(tmp_path), num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    config = load(tiny_qwen3(tmp_path), head_dim=None)
    assert config.head_dim == 128


def test_unused_sliding_window_is_accepted(tmp_path: Path) -> None:
    config = load(tiny_qwen2(tmp_path), sliding_window=131072, use_sliding_window=False, max_window_layers=21)
    assert config.family == "qwen2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba' is not supported; supported are llama, qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: quantised weights \(fp8\)"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window: "),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window: "),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": "32"}, "hidden_size: must be a positive number"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers: must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"head_dim": 15}, "head_dim: must be even"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: must be true or false"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, r"rope_parameters\.rope_type: 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor: is missing"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_parameters": [1]}, "rope_parameters: must be an object"),
    ],
)  # fmt: skip
def test_refusals_name_file_and_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = tiny_model(tmp_path, "qwen3")
    with pytest.raises(ModelError, match=message) as caught:
        load(directory, **changes)
    assert str(caught.value).startswith(str(directory / "config.json"))
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        ModelConfig.load(tmp_path)
