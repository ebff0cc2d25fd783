"""The megakernel as the way of a decoder's small steps, put together on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from models.config import ModelConfig
from models.cuda import fast_steps
from models.cuda.decoder_weights import MATRICES, load_weights
from models.cuda.fast_steps import FastSteps, obstacle
from models.cuda.megakernel import Megakernel
from models.cuda.shard import Shard
from models.cuda.tensor_map import MAP_BYTES, Boxes
from models.decoder import Decoder
from models.rows import Rows
from models.weights import Checkpoint
from tests.models.cuda.mega_cases import half_rotations, mega_weights
from tests.models.tiny import VOCAB, tiny_model

if TYPE_CHECKING:
    from models.cuda.decoder import CudaDecoder

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 384}


class NoLauncher:
    def encode(self, boxes: Boxes) -> bytes:
        return bytes(MAP_BYTES)

    def launch(self, params: object, rows: int, grid: int) -> None:
        raise AssertionError("nothing is to be started here")


def decoder_of(directory: Path, vocab_size: int = VOCAB) -> CudaDecoder:
    """The parts of a decoder that are read."""
    config = ModelConfig.load(directory)
    weights = load_weights(
        Checkpoint(directory, config), config, Shard(), dtype=torch.bfloat16, device=CPU, vocab_size=vocab_size
    )
    pool = torch.zeros(config.num_layers, 5, config.num_kv_heads, 16, config.head_dim, dtype=torch.bfloat16)
    parts = {
        "config": config,
        "weights": weights,
        "device": CPU,
        "processors": 4,
        "dtype": torch.bfloat16,
        "vocab_size": vocab_size,
        "k_cache": pool,
        "v_cache": pool.clone(),
        "rotations": half_rotations(config, 64),
        "fast_path": None,
    }
    return cast("CudaDecoder", SimpleNamespace(**parts))


def empty_rows(count: int, wanted: int) -> Rows:
    """Rows of this shape."""
    row, logit_rows = torch.zeros(count, dtype=torch.int32), torch.zeros(wanted, dtype=torch.int32)
    return Rows(row, row, row, row, row, page_table=torch.zeros(1, 1, dtype=torch.int32), logit_rows=logit_rows)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_vectors_and_matrices_are_the_reference_ones(tmp_path: Path, family: str) -> None:
    directory = tiny_model(tmp_path, family, dtype=torch.bfloat16, **WIDE)
    ids = VOCAB - 2
    decoder = decoder_of(directory, ids)
    fast = FastSteps(decoder, launcher=NoLauncher())
    reference = Decoder(
        directory,
        ModelConfig.load(directory),
        dtype=torch.bfloat16,
        device=CPU,
        context_length=64,
        vocab_size=ids,
    )
    wanted = mega_weights(reference, reference.config, 4, CPU)
    assert torch.equal(fast.weights.vectors, wanted.vectors)
    assert torch.equal(fast.weights.final_norm, wanted.final_norm)
    for kind, stack in decoder.weights.stacks.items():
        assert torch.equal(stack, torch.stack([getattr(layer, kind) for layer in reference._layers]))
    # They are read where they are.
    addresses = [boxes.address for _, _, sizes in fast.weights.dealt() for boxes in sizes[:1]]
    held = [*(decoder.weights.stacks[kind] for kind in MATRICES), decoder.weights.head]
    assert addresses == [tensor.data_ptr() for tensor in held]


@pytest.mark.parametrize(("share", "most"), [(1.0, 16), (0.8, 16), (0.5, 12), (0.25, 12)])
def test_kernel_goes_with_its_pool(tmp_path: Path, share: float, most: int) -> None:
    decoder = decoder_of(tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE))
    fast = FastSteps(decoder, share, NoLauncher())
    fast.attach()
    assert isinstance(decoder.fast_path, Megakernel)
    sizes = ((1, 0, True), (most, most, True), (most + 1, 1, False), (8, most + 1, False), (0, 0, False))
    for rows, wanted, taken in sizes:
        assert decoder.fast_path.takes(empty_rows(rows, wanted)) is taken
    assert [decoder.fast_path.skips(rows) for rows in (1, most, most + 1)] == [True, True, False]
    assert any(tensor is decoder.k_cache for tensor in decoder.fast_path._tensors)
    fast.detach()
    assert decoder.fast_path is None


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
