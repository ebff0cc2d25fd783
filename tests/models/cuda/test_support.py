"""What the CUDA decoder refuses before it reads weights; no device is needed to say so."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig, ModelError
from models.cuda.decoder import CudaDecoder
from models.cuda.shard import Shard
from models.cuda.support import check_device, check_model
from tests.models.tiny import tiny_model


def config(directory: Path, **options: Any) -> ModelConfig:
    return ModelConfig.load(tiny_model(directory, "qwen3", tokenizer=False, **options))


def present(*names: str) -> Callable[[str], object]:
    return lambda name: object() if name in names else None


def test_head_sizes_and_pages(tmp_path: Path) -> None:
    good = config(tmp_path)
    check_model(good, "a/config.json", 1)
    with pytest.raises(ModelError, match=re.escape("a/config.json: page_size must be at least 1, not 0")):
        check_model(good, "a/config.json", 0)
    odd = config(tmp_path / "odd", head_dim=48)
    message = "a/config.json: head_dim: 48 is not supported on CUDA; supported are 16, 32, 64, 128, 256"
    with pytest.raises(ModelError, match=re.escape(message)):
        check_model(odd, "a/config.json", 16)


def refused(device: str) -> str:
    with pytest.raises(ModelError) as caught:
        check_device(torch.device(device))
    return str(caught.value)


def test_triton_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", present())
    assert refused("cuda") == "the CUDA decoder needs triton, which is not installed: pip install triton"


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", present("triton"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert refused("cpu") == "device cpu: the CUDA decoder needs a CUDA device; use the torch backend"
    assert refused("cuda:0") == "device cuda:0: no CUDA device is usable: check the driver with nvidia-smi"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_device(torch.device("cpu"))
    assert refused("meta").startswith("device meta: the CUDA decoder needs a CUDA device")


def test_old_and_absent_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", present("triton"))
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "get_device_capability": (7, 5),
        "get_device_name": "Old card",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_args, value=value: value)
    assert refused("cuda:2") == "device cuda:2: there are only 2 CUDA devices"
    assert refused("cuda:1") == (
        "device cuda:1: Old card has compute capability 7.5, the kernels need 8.0 (Ampere) or newer; use the torch backend"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    check_device(torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard(2, 2), "a/config.json: rank 2 is not one of 2 ranks"),
        (Shard(-1, 2), "a/config.json: rank -1 is not one of 2 ranks"),
        (Shard(0, 3), "a/config.json: num_attention_heads: 4 cannot be dealt out to 3 devices evenly"),
        (Shard(0, 4), "a/config.json: num_key_value_heads: 2 cannot be dealt out to 4 devices evenly"),
    ],
)
def test_shards_that_do_not_divide(tmp_path: Path, shard: Shard, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        shard.check(config(tmp_path), "a/config.json")


def test_shards_of_the_intermediate_columns(tmp_path: Path) -> None:
    odd = config(tmp_path, ffn=49)
    message = "a/config.json: intermediate_size: 49 cannot be dealt out to 2 devices evenly"
    with pytest.raises(ModelError, match=re.escape(message)):
        Shard(1, 2).check(odd, "a/config.json")
    Shard(0, 1).check(odd, "a/config.json")
    parts = [Shard(rank, 4).part(12) for rank in range(4)]
    assert [list(range(12))[part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": Shard(0, 3)}, "num_attention_heads: 4"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"device": "cpu"}, "the CUDA decoder needs a CUDA device"),
    ],
)
def test_load_says_so_before_it_reads_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    directory = tiny_model(tmp_path, "qwen3", tokenizer=False)
    (directory / "model.safetensors").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", present("triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ModelError, match=message):
        CudaDecoder.load(directory, **options)
