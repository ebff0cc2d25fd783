"""The packed copy of a CUDA decoder's weights, made on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from models.config import ModelConfig
from models.cuda import fast_steps, packing
from models.cuda.decoder_weights import MATRICES, LayerWeights, load_weights
from models.cuda.fast_steps import FastSteps, Packer, obstacle
from models.cuda.megakernel import COPY_SHARE, Megakernel
from models.cuda.packing import Layout
from models.cuda.shard import Shard
from models.decoder import Decoder
from models.rows import Rows
from models.weights import Checkpoint
from tests.models.cuda.mega_cases import half_rotations, pack_decoder
from tests.models.tiny import VOCAB, tiny_model

if TYPE_CHECKING:
    from models.cuda.decoder import CudaDecoder

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 384}


class NoLauncher:
    def launch(self, params: object, rows: int, grid: int) -> None:
        raise AssertionError("nothing is to be started here")


def packer_of(directory: Path, vocab_size: int, alone: bool = False, share: float = 1.0) -> Packer:
    return Packer(ModelConfig.load(directory), vocab_size=vocab_size, device=CPU, share=share, alone=alone)


def decoder_of(directory: Path, packer: Packer) -> CudaDecoder:
    """The parts of a decoder that are read."""
    config, vocab_size = ModelConfig.load(directory), packer.weights.vocab_size
    weights = load_weights(
        Checkpoint(directory, config),
        config,
        Shard(),
        dtype=torch.bfloat16,
        device=CPU,
        vocab_size=vocab_size,
        finish_layer=packer.layer,
    )
    pool = torch.zeros(config.num_layers, 5, config.num_kv_heads, 16, config.head_dim, dtype=torch.bfloat16)
    parts = {
        "config": config,
        "weights": weights,
        "device": CPU,
        "dtype": torch.bfloat16,
        "vocab_size": vocab_size,
        "k_cache": pool,
        "v_cache": pool.clone(),
        "rotations": half_rotations(config, 64),
        "fast_path": None,
        "unpack": None,
        "packed_bytes": 0,
    }
    return cast("CudaDecoder", SimpleNamespace(**parts))


def empty_rows(count: int, wanted: int) -> Rows:
    """Rows of this shape."""
    row, logit_rows = torch.zeros(count, dtype=torch.int32), torch.zeros(wanted, dtype=torch.int32)
    return Rows(row, row, row, row, row, page_table=torch.zeros(1, 1, dtype=torch.int32), logit_rows=logit_rows)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_packed_as_the_reference(tmp_path: Path, family: str, alone: bool) -> None:
    directory = tiny_model(tmp_path, family, dtype=torch.bfloat16, **WIDE)
    ids = VOCAB - 2
    packer = packer_of(directory, ids, alone)
    fast = FastSteps(decoder_of(directory, packer), packer, NoLauncher())
    reference = Decoder(
        directory,
        ModelConfig.load(directory),
        dtype=torch.bfloat16,
        device=CPU,
        context_length=64,
        vocab_size=ids,
    )
    wanted = pack_decoder(reference, reference.config, 4, CPU)
    used = torch.isfinite(wanted.stream)  # what lies between matrices is never read
    assert torch.equal(fast.weights.stream[used], wanted.stream[used])
    assert torch.equal(fast.weights.vectors, wanted.vectors)
    assert torch.equal(fast.weights.final_norm, wanted.final_norm)


@pytest.mark.parametrize(
    ("share", "alone", "most"),
    [(1.0, False, 24), (0.8, False, 24), (0.5, False, 12), (0.25, False, 12), (0.5, True, 64)],
)
def test_kernel_goes_with_its_pool(tmp_path: Path, share: float, alone: bool, most: int) -> None:
    directory = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE)
    packer = packer_of(directory, VOCAB, alone, share)
    decoder = decoder_of(directory, packer)
    fast = FastSteps(decoder, packer, NoLauncher())
    fast.attach()
    assert isinstance(decoder.fast_path, Megakernel)
    sizes = ((1, 0, True), (most, most, True), (most + 1, 1, False), (8, most + 1, False), (0, 0, False))
    for rows, wanted, taken in sizes:
        assert decoder.fast_path.takes(empty_rows(rows, wanted)) is taken
    assert [decoder.fast_path.skips(rows) for rows in (1, most, most + 1)] == [True, True, False]
    assert any(tensor is decoder.k_cache for tensor in decoder.fast_path._tensors)
    fast.detach()
    assert decoder.fast_path is None


def test_one_layer_at_a_time_exists_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is given to the packer, the layers before it have no plain matrices any more."""
    directory = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, layers=3, **WIDE)
    packer = packer_of(directory, VOCAB, alone=True)
    seen: list[LayerWeights] = []
    held: list[list[int]] = []
    pack = packer.layer

    def layer(index: int, weights: LayerWeights) -> None:
        seen.append(weights)
        held.append([len(one.matrices) for one in seen])
        pack(index, weights)

    monkeypatch.setattr(packer, "layer", layer)
    decoder = decoder_of(directory, packer)
    assert held == [[4], [0, 4], [0, 0, 4]]
    FastSteps(decoder, packer, NoLauncher())
    assert decoder.unpack is not None
    workspace = 2 * max(layout.outputs * layout.inputs for layout in packer.weights.layouts.values())
    assert decoder.packed_bytes == packer.weights.bytes() + workspace


def test_plain_matrices_stay_where_there_is_room(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE)
    packer = packer_of(directory, VOCAB)
    decoder = decoder_of(directory, packer)
    FastSteps(decoder, packer, NoLauncher())
    assert all(set(layer.matrices) == set(MATRICES) for layer in decoder.weights.layers)
    assert decoder.unpack is None
    assert decoder.packed_bytes == packer.weights.bytes()


@pytest.mark.parametrize(
    ("outputs", "inputs", "grid", "interleaved"),
    [(40, 64, 4, False), (37, 96, 3, False), (512, 544, 4, True), (4000, 64, 7, True)],
)
def test_packed_in_slices(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, grid: int, interleaved: bool
) -> None:
    layout = Layout(outputs, inputs, grid, interleaved)
    weight = torch.randn(outputs, inputs).to(torch.bfloat16)
    whole, sliced = (torch.zeros(layout.elements, dtype=torch.bfloat16) for _ in range(2))
    layout.pack(weight, whole)
    monkeypatch.setattr(packing, "_SLICE_BYTES", 3 * 8 * inputs * 2)
    layout.pack(weight, sliced)
    assert torch.equal(whole, sliced)
    assert torch.equal(layout.unpack(whole), weight)


def test_large_models_are_packed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.load(tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE))
    size = 2 * config.parameters()

    def on(memory: int) -> bool:
        facts = SimpleNamespace(total_memory=memory, multi_processor_count=5)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        monkeypatch.setattr(fast_steps, "PackedWeights", lambda config, **options: SimpleNamespace(**options))
        packer = Packer(config, vocab_size=VOCAB, device=torch.device("cuda"))
        assert packer.weights.grid == 5
        return packer.alone

    assert not on(size * COPY_SHARE)
    assert on(size * COPY_SHARE - 1)


def test_obstacles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.load(tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE))

    monkeypatch.setattr(fast_steps, "find_nvcc", lambda: "nvcc")

    def on(major: int, dtype: torch.dtype = torch.bfloat16) -> str:
        facts = SimpleNamespace(major=major, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        return obstacle(config, dtype, torch.device("cuda"))

    assert on(9) == ""
    assert "compute capability 9.0" in on(8)
    assert "bfloat16" in on(9, torch.float32)
    monkeypatch.setattr(fast_steps, "find_nvcc", lambda: None)
    assert "nvcc" in on(9)
