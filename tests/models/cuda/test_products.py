"""The trial of matrix products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.cuda.products import shapes_of, wrong_product
from models.weights import expected_tensors
from tests.models.tiny import tiny_qwen3

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_right_products_pass(dtype: torch.dtype) -> None:
    assert wrong_product(CPU, dtype, [(96, 64), (640, 32)], (1, 5, 64)) == ""


@pytest.mark.parametrize("wrong", [float("nan"), 0.0])
def test_a_tile_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    real = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        real(a, b, out=out)
        if len(a) == 64:
            out[:, 128:256] = wrong
        return out

    monkeypatch.setattr(torch, "mm", mm)
    assert wrong_product(CPU, torch.bfloat16, [(640, 32)], (1, 5, 64)) == "64 x 32 by 32 x 640"


def test_shapes_are_those_of_the_weights(tmp_path: Path) -> None:
    config = ModelConfig.load(tiny_qwen3(tmp_path))
    sizes = {name.removeprefix("model.layers.0."): shape for name, shape in expected_tensors(config)}
    qkv, o, gate_up, down, head = shapes_of(config, 100)
    parts = [sizes[f"self_attn.{part}_proj.weight"] for part in "qkv"]
    assert qkv == (sum(part[0] for part in parts), parts[0][1])
    assert o == sizes["self_attn.o_proj.weight"]
    assert gate_up == (2 * sizes["mlp.gate_proj.weight"][0], sizes["mlp.gate_proj.weight"][1])
    assert down == sizes["mlp.down_proj.weight"]
    assert head == (100, config.hidden_size)
