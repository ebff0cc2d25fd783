"""Which of our decoders, or transformers' own modelling code, runs a checkpoint: decided by `model_type` alone."""

from __future__ import annotations

from pathlib import Path

from models.config import FAMILIES, ModelConfig, ModelError, read_json
from models.transformers_config import TransformersConfig

Shape = ModelConfig | TransformersConfig


def load_shape(directory: Path) -> Shape:
    """Read `directory`/config.json. Raises ModelError."""
    family = read_json(Path(directory) / "config.json").get("model_type")
    # A file without a model_type gets the message of our own families.
    own = not isinstance(family, str) or family in FAMILIES
    return ModelConfig.load(directory) if own else TransformersConfig.load(directory)


def weight_bytes(directory: Path, element_size: int) -> int:
    """Bytes of a checkpoint's weights with elements of this size: exact for our own families, the size of the files for others."""
    try:
        return ModelConfig.load(directory).parameters() * element_size
    except ModelError:
        return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
