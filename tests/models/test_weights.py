"""Checkpoint files: whole, sharded, damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ModelConfig, ModelError
from models.torch_runner import TorchRunner
from models.weights import Checkpoint, resolve_dtype
from tests.models.tiny import tiny_qwen2, tiny_qwen3

CPU = torch.device("cpu")


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def shard(directory: Path) -> Path:
    """Split a checkpoint into two files and an index; returns the second file."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory / "model-00002-of-00002.safetensors"


def open_checkpoint(directory: Path) -> Checkpoint:
    return Checkpoint(directory, ModelConfig.load(directory))


def test_sharded_and_single_are_the_same(tmp_path: Path) -> None:
    single, sharded = tiny_qwen3(tmp_path / "a"), tiny_qwen3(tmp_path / "b")
    shard(sharded)
    ours, theirs = open_checkpoint(single), open_checkpoint(sharded)
    for name in load_file(single / "model.safetensors"):
        assert torch.equal(ours.read(name, torch.float32, CPU), theirs.read(name, torch.float32, CPU))


def test_dtypes(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path, dtype=torch.bfloat16)
    config = ModelConfig.load(directory)
    assert resolve_dtype("auto", config) == torch.bfloat16
    assert resolve_dtype("float32", config) == torch.float32
    with pytest.raises(ModelError, match="'float8' is not supported"):
        resolve_dtype("float8", config)
    assert Checkpoint(directory, config).read("model.norm.weight", torch.float32, CPU).dtype == torch.float32


def test_a_tied_checkpoint_may_hold_its_head_twice(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    rewrite(directory, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert TorchRunner.load(directory, num_pages=1, page_size=16).vocab_size == 260


def test_missing_unknown_and_misshapen_tensors(tmp_path: Path) -> None:
    directory = tiny_qwen2(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    bias = "model.layers.1.self_attn.k_proj.bias"
    rewrite(directory, {name: tensor for name, tensor in tensors.items() if name != bias})
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {bias} is missing"):
        open_checkpoint(directory)
    rewrite(directory, tensors | {"model.layers.2.foo": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.2\.foo is not part of a qwen2 model"):
        open_checkpoint(directory)
    rewrite(directory, tensors | {bias: torch.zeros(31)})
    with pytest.raises(ModelError, match=rf"tensor {bias} has shape \(31,\), config\.json asks for \(32,\)"):
        open_checkpoint(directory)
    rewrite(directory, tensors | {bias: torch.zeros(32, dtype=torch.int8)})
    with pytest.raises(ModelError, match=rf"tensor {bias} has dtype I8; supported are F64, F32, F16, BF16"):
        TorchRunner.load(directory, num_pages=1, page_size=16)


def test_absurd_number_of_layers_is_found_at_once(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 10**12, "layer_types": None}))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.\d+\.self_attn\.q_proj\.weight is missing"):
        open_checkpoint(directory)


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_files(tmp_path: Path, size: int) -> None:
    directory = tiny_qwen3(tmp_path)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged or unreadable") as caught:
        TorchRunner.load(directory, num_pages=1, page_size=16)
    assert "\n" not in str(caught.value)


def test_shard_faults(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path)
    second = shard(directory)
    tensors = load_file(second)
    lost = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, second)
    with pytest.raises(ModelError, match=rf"{second.name}: tensor {lost} is missing"):
        open_checkpoint(directory)
    second.unlink()
    with pytest.raises(ModelError, match=rf"{second.name}: the file is missing"):
        open_checkpoint(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "../secret"}}')
    with pytest.raises(ModelError, match="is not a file name"):
        open_checkpoint(directory)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: weight_map"):
        open_checkpoint(directory)
    index.unlink()
    with pytest.raises(ModelError, match="only safetensors weights are read"):
        open_checkpoint(directory)


def test_sizes_that_do_not_fit_together(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path)
    with pytest.raises(ModelError, match="tokenizer has 300 ids, the model only 260"):
        TorchRunner.load(directory, num_pages=1, page_size=16, vocab_size=300)
    with pytest.raises(ModelError, match="context_length 600 is over the model's 512"):
        TorchRunner.load(directory, num_pages=1, page_size=16, context_length=600)
