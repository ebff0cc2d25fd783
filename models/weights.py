"""Checkpoint tensors: safetensors files, single or sharded, read into the shapes that the decoder asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.config import ModelConfig, ModelError, read_json
from models.shape import Shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FILE_DTYPES = ("F64", "F32", "F16", "BF16")
"""As safetensors names them; whatever else there is, is quantised."""
_SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Buffers that old checkpoints saved although they follow from config.json.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def resolve_dtype(name: str, config: Shape) -> torch.dtype:
    """The torch dtype of "float32", "bfloat16" or "auto" (what the checkpoint declares). Raises ModelError."""
    resolved = config.dtype if name == "auto" else name
    if resolved not in DTYPES:
        raise ModelError(f"dtype {resolved!r} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[resolved]


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a checkpoint of this shape holds; a tied LM head is not among them.

    One by one: the number of layers is whatever config.json says.
    """
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        yield from _layer_tensors(config, f"model.layers.{layer}.")
    yield "model.norm.weight", (hidden,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _layer_tensors(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
        if config.qk_norm and name != "v":
            yield f"{prefix}self_attn.{name}_norm.weight", (config.head_dim,)
    yield f"{prefix}self_attn.o_proj.weight", (hidden, q)
    if config.o_bias:
        yield f"{prefix}self_attn.o_proj.bias", (hidden,)
    for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        yield f"{prefix}mlp.{name}_proj.weight", shape
        if config.mlp_bias:
            yield f"{prefix}mlp.{name}_proj.bias", shape[:1]
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)


class Checkpoint:
    """The tensors of one directory, checked by name and shape on opening and read one by one.

    Raises ModelError, naming file and tensor, when a file is absent or damaged, or when a tensor is missing, unknown
    or of another shape than `config` says.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._directory = Path(directory)
        self._files = locate(self._directory)
        self._expected: dict[str, tuple[int, ...]] = {}
        self._check(config)
        self._handles: dict[Path, Any] = {}

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One tensor, converted and moved."""
        # A copy, aligned and independent of the mapped file, which may be replaced while the model runs.
        return self.part(name, (slice(None),)).to(device=device, dtype=dtype, copy=True)

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A part of one tensor as the file holds it, on the host; it may lie in the mapped file, so copy it at once."""
        path = self._files[name]
        with _named(path):
            if path not in self._handles:
                self._handles[path] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._handles[path].get_slice(name)[index]
        return tensor

    def _check(self, config: ModelConfig) -> None:
        index = self._directory / (_SINGLE if (self._directory / _SINGLE).exists() else INDEX)
        for name, shape in expected_tensors(config):
            if name not in self._files:
                raise ModelError(f"{index}: tensor {name} is missing")
            self._expected[name] = shape
        for name in self._files:
            known = name in self._expected or name.endswith(IGNORED_SUFFIXES)
            # Tied checkpoints may hold the LM head a second time.
            if not known and not (config.tied and name == "lm_head.weight"):
                raise ModelError(f"{index}: tensor {name} is not part of a {config.family} model of this shape")
        for path in dict.fromkeys(self._files.values()):
            self._check_shapes(path)

    def _check_shapes(self, path: Path) -> None:
        with _named(path), safe_open(path, framework="pt") as file:
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            held = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
        for name, shape in self._expected.items():
            if self._files[name] != path:
                continue
            if name not in held:
                raise ModelError(f"{path}: tensor {name} is missing, though {INDEX} places it here")
            if held[name][0] != shape:
                raise ModelError(f"{path}: tensor {name} has shape {held[name][0]}, config.json asks for {shape}")
            if held[name][1] not in _FILE_DTYPES:
                known = ", ".join(_FILE_DTYPES)
                raise ModelError(f"{path}: tensor {name} has dtype {held[name][1]}; supported are {known}")


def locate(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the files' headers or their index. Raises ModelError, naming the file."""
    single, index = directory / _SINGLE, directory / INDEX
    if single.exists():
        with _named(single), safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.exists():
        raise ModelError(f"{directory}: neither {_SINGLE} nor {INDEX} is there; only safetensors weights are read")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{index}: weight_map: must map tensor names to file names")
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name:
            raise ModelError(f"{index}: weight_map: {name!r} is not a file name")
        if not (directory / name).exists():
            raise ModelError(f"{directory / name}: the file is missing, though {INDEX} names it")
    return {tensor: directory / name for tensor, name in places.items()}


def read_row(path: Path, name: str, row: int) -> torch.Tensor:
    """[H] float32: one row of a [N, H] tensor in a file, on the host. Raises ModelError."""
    with _named(path), safe_open(path, framework="pt") as file:
        tensor = file.get_slice(name)
        shape = tensor.get_shape()
        if len(shape) != 2 or row >= shape[0]:
            raise ModelError(f"{path}: tensor {name} has shape {tuple(shape)}; row {row} is needed")
        return torch.as_tensor(tensor[row]).float().clone()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file raises into one line with its name."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged or unreadable: {error}") from error
