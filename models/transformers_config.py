"""Shape of a checkpoint that only transformers' own modelling code can run, read through its configuration class.

transformers and torch are imported on first use: a host that serves only our own families never pays for it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config import FAMILIES, ModelError, read_json

_LAYER_BOUNDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer types that equal full attention up to a length, and the field that holds it."""
_SWITCHING_ROPES = ("dynamic", "longrope", "su")
"""Rotations that depend on the longest row of a batch beyond the length of pre-training, and on nothing up to it."""
_BOUND_FIELDS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """What a worker has to know of a dense or mixture-of-experts causal LM whose layers are all attention."""

    family: str
    """`model_type` of config.json."""
    vocab_size: int
    """Rows of the embedding, which may be more than the tokenizer has ids."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    """Longest sequence for which full attention is what the model computes."""
    bound: str
    """The field of config.json that keeps `context_length` below what the model was made for; '' if none does."""
    dtype: str
    """The dtype that the checkpoint declares: what "auto" means."""

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V of one token in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size

    @classmethod
    def load(cls, directory: Path) -> TransformersConfig:
        """Read `directory`/config.json. Raises ModelError, also for models that cannot be served."""
        path = Path(directory) / "config.json"
        configuration = read_configuration(Path(directory))
        modelling_class(path, configuration)
        return _parse(path, configuration)


def read_configuration(directory: Path) -> Any:
    """transformers' configuration object of a checkpoint directory; no code of the checkpoint is run. Raises ModelError."""
    path = directory / "config.json"
    content = read_json(path)
    family = content.get("model_type")
    if not isinstance(family, str):
        raise ModelError(f"{path}: model_type: must be a string, not {family!r}")
    if content.get("quantization_config") is not None:
        raise ModelError(f"{path}: quantization_config: quantised weights are not supported; use the originals")
    if (directory / "adapter_config.json").exists():
        raise ModelError(f"{directory / 'adapter_config.json'}: adapters are not supported; merge it into the weights")
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{path}: model_type: {family!r} is not supported; supported are {', '.join(FAMILIES)}"
            f" and the language models of transformers, of which version {transformers.__version__} has none of that name"
        )
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    architectures = content.get("architectures")
    if isinstance(architectures, list) and architectures and wanted not in architectures:
        raise ModelError(f"{path}: architectures: {architectures[0]} is not the language model of {family!r}, {wanted}")
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, StrictDataclassError) as error:
        raise ModelError(f"{path}: transformers cannot read it: {' '.join(str(error).split())}") from error


def modelling_class(path: Path, configuration: Any) -> Any:
    """transformers' class of causal LMs of this configuration. Raises ModelError when its attention cannot be replaced."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(configuration)]
    family = configuration.model_type
    if getattr(found, "_is_stateful", False):
        raise ModelError(f"{path}: model_type: {family!r} is recurrent, which is not supported")
    if not found.is_backend_compatible():
        raise ModelError(
            f"{path}: model_type: {family!r} has attention in transformers that cannot be replaced, as paged KV needs"
        )
    return found


def _parse(path: Path, config: Any) -> TransformersConfig:
    family: str = config.model_type
    if config.get_text_config() is not config:
        raise ModelError(f"{path}: model_type: {family!r} holds more than a language model, which is not supported")
    if config.is_encoder_decoder:
        raise ModelError(f"{path}: is_encoder_decoder: encoder-decoder models are not supported")
    for field in ("attn_logit_softcapping", "attn_logit_softcap", "attention_logits_soft_cap"):
        if getattr(config, field, None) is not None:
            raise ModelError(f"{path}: {field}: soft-capped attention is not supported")
    heads = _count(path, config, "num_attention_heads")
    context, bound = _context(path, config)
    dtype = config.dtype
    return TransformersConfig(
        family=family,
        vocab_size=_count(path, config, "vocab_size"),
        hidden_size=_count(path, config, "hidden_size"),
        num_layers=_count(path, config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(path, config, heads),
        head_dim=_count(path, config, "head_dim", _count(path, config, "hidden_size") // heads),
        context_length=context,
        bound=bound,
        dtype="float32" if dtype is None else str(dtype).removeprefix("torch."),
    )


def _kv_heads(path: Path, config: Any, heads: int) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    kv_heads = _count(path, config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{path}: num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    return kv_heads


def _context(path: Path, config: Any) -> tuple[int, str]:
    """The context length, and the field that bounds it below what the model was made for."""
    context, bound = _count(path, config, "max_position_embeddings"), ""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Without layer types whoever has a window uses it in every layer, unless it is switched off.
        used = getattr(config, "use_sliding_window", True)
        fields = {field for field in _BOUND_FIELDS if used and getattr(config, field, None) is not None}
    else:
        unknown = [kind for kind in kinds if kind != "full_attention" and kind not in _LAYER_BOUNDS]
        if unknown:
            raise ModelError(f"{path}: layer_types: {unknown[0]!r} layers are not supported, only attention")
        fields = {_LAYER_BOUNDS[kind] for kind in kinds if kind in _LAYER_BOUNDS}
    for field in sorted(fields):
        length = _count(path, config, field)
        if length < context:
            context, bound = length, field
    original = _switching_length(path, config)
    return (original, "rope_parameters") if original is not None and original < context else (context, bound)


def _switching_length(path: Path, config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    switching = [part for part in parts if part.get("rope_type") in _SWITCHING_ROPES]
    lengths = [part.get("original_max_position_embeddings") for part in switching]
    known = [length for length in lengths if isinstance(length, int)]
    if len(known) < len(lengths):
        # transformers falls back to the field at the top.
        known.append(_count(path, config, "original_max_position_embeddings", config.max_position_embeddings))
    return min(known, default=None)


def _count(path: Path, config: Any, field: str, default: int | None = None) -> int:
    value = getattr(config, field, None)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{path}: {field}: must be a positive whole number, not {value!r}")
    return value
