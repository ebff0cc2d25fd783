"""The trial of matrix products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config import ModelConfig, ModelError
from models.cuda import products
from models.cuda.products import shapes_of, wrong_product
from models.cuda.shard import Shard
from models.parallel.leader import SplitModel
from models.parallel.part import load_part
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_tries_the_products_of_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    tried: list[tuple[tuple[int, int], ...]] = []

    def wrong(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, int]], rows: Sequence[int]) -> str:
        assert (device, dtype, rows) == (CPU, torch.float32, (1, 8))
        tried.append(tuple(shapes))
        return "8 x 32 by 32 x 64"

    monkeypatch.setattr("models.cuda.decoder.check_device", lambda device: None)
    monkeypatch.setattr(products, "wrong_product", wrong)
    directory = tiny_qwen3(tmp_path)
    model = SplitModel(str(directory), ("cpu", "cpu"), dtype="float32", vocab_size=100, step_rows=(1, 8))
    load_part(model.order(rank), Shard(rank, 2))
    assert not tried, "nothing limits it"
    with pytest.raises(ModelError, match=r"^sm_percent: on 79 % of the multiprocessors of cpu .*8 x 32 by 32 x 64"):
        load_part(replace(model, sm_percent=79).order(rank), Shard(rank, 2))
    config = ModelConfig.load(directory)
    qkv, o, gate_up, down, (_, hidden) = shapes_of(config, 100)
    halves = [(qkv[0] // 2, qkv[1]), (o[0], o[1] // 2), (gate_up[0] // 2, gate_up[1]), (down[0], down[1] // 2)]
    assert tried[0][:-1] == tuple(halves)
    assert tried[0][-1][0] >= 50
    assert tried[0][-1][1] == hidden


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
