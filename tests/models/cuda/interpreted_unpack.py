"""Packed weights unpacked by the kernel, on the CPU through Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py"

from models.config import ModelConfig
from models.cuda.decoder import CudaDecoder
from models.cuda.fast_steps import FastSteps, Packer
from models.cuda.kernels.unpack import unpack
from models.cuda.packing import Layout
from tests.models.cuda import stage
from tests.models.cuda.stage import Inactive, Run
from tests.models.tiny import tiny_model

PAGE = 16
CONTEXT = 64


class NoLauncher:
    def launch(self, params: object, rows: int, grid: int) -> None:
        raise AssertionError("nothing is to be started here")


@pytest.mark.parametrize(
    ("outputs", "inputs", "grid"),
    [
        (40, 64, 4),  # an SM has two units, the others one
        (36, 96, 3),  # the last unit is half full
        (16, 32, 5),  # more SMs than units
        (512, 544, 4),  # more blocks than a program takes, and a rest
        (1000, 64, 2),  # several tiles of different sizes to an SM
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_unpacked_as_by_the_layout(outputs: int, inputs: int, grid: int, interleaved: bool) -> None:
    layout = Layout(outputs, inputs, grid, interleaved)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    packed = torch.empty(layout.elements, dtype=torch.bfloat16)
    layout.pack(weight, packed)
    # What lies behind the matrix is another one's.
    room = torch.full((outputs * inputs + 512,), 7.0, dtype=torch.bfloat16)
    out = room[: outputs * inputs].view(outputs, inputs)
    unpack(layout, packed, out)
    assert torch.equal(out, layout.unpack(packed))
    assert torch.equal(out, weight)
    assert (room[outputs * inputs :] == 7.0).all()


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("llama", {"mlp_bias": True, "tied": False})])
def test_packed_decoder_equals_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any]
) -> None:
    # On a CPU torch has no product of bfloat16 that gives float32.
    monkeypatch.setattr(CudaDecoder, "_logits", lambda self, hidden: hidden.float() @ self.weights.head.t().float())
    directory = tiny_model(
        tmp_path,
        family,
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        ffn=96,
        dtype=torch.bfloat16,
        tokenizer=False,
        **changes,
    )
    config, device = ModelConfig.load(directory), torch.device("cpu")
    packer = Packer(config, vocab_size=258, device=device, alone=True)
    table = stage.page_table(2, CONTEXT, PAGE)
    options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "page_size": PAGE, "vocab_size": 258}
    plain = CudaDecoder.load(directory, **options)
    packed = CudaDecoder.load(directory, **options, finish_layer=packer.layer)
    before = packed.weight_bytes
    fast = FastSteps(packed, packer, NoLauncher())
    for decoder in (plain, packed):
        decoder.allocate_kv(table.size)
    fast.attach()
    assert not any(layer.matrices for layer in packed.weights.layers)
    assert packed.weight_bytes == before + packer.weights.bytes() + 2 * 64 * 192
    # More rows than the megakernel takes, then what it is for, with the kernel detached.
    steps: list[list[Run]] = [[(0, 0, list(range(62))), (1, 0, [5, 6, 7, 8])], [(0, 62, [9]), (1, 4, [1, 2])]]
    for runs in steps:
        rows = stage.device_rows(runs, table, "cpu", inactive=Inactive(after=1))
        output, expected = packed.forward(rows), plain.forward(rows)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.hidden, expected.hidden)
        fast.detach()
    assert torch.equal(packed.k_cache, plain.k_cache)
