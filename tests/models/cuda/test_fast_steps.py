"""The packed copy of a CUDA decoder's weights, made on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from models.config import ModelConfig
from models.cuda import fast_steps
from models.cuda.decoder_weights import load_weights
from models.cuda.fast_steps import FastSteps, obstacle
from models.cuda.megakernel import Megakernel
from models.cuda.shard import Shard
from models.decoder import Decoder
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


def decoder_of(directory: Path, vocab_size: int) -> CudaDecoder:
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
        "dtype": torch.bfloat16,
        "vocab_size": vocab_size,
        "k_cache": pool,
        "v_cache": pool.clone(),
        "rotations": half_rotations(config, 64),
        "fast_path": None,
        "shard": Shard(),
        "weight_bytes": weights.bytes(),
    }
    return cast("CudaDecoder", SimpleNamespace(**parts))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_packed_as_the_reference(tmp_path: Path, family: str) -> None:
    directory = tiny_model(tmp_path, family, dtype=torch.bfloat16, **WIDE)
    ids = VOCAB - 2
    fast = FastSteps(decoder_of(directory, ids), NoLauncher())
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


def test_kernel_goes_with_its_pool(tmp_path: Path) -> None:
    decoder = decoder_of(tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE), VOCAB)
    fast = FastSteps(decoder, NoLauncher())
    fast.attach()
    assert isinstance(decoder.fast_path, Megakernel)
    assert any(tensor is decoder.k_cache for tensor in decoder.fast_path._tensors)
    fast.detach()
    assert decoder.fast_path is None


def test_obstacles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE), VOCAB)
    size = decoder.weight_bytes

    def on(major: int, memory: int) -> str:
        facts = SimpleNamespace(major=major, minor=0, total_memory=memory, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        return obstacle(decoder)

    assert on(9, size * fast_steps.COPY_SHARE) == ""
    assert "second copy of the weights" in on(9, size * fast_steps.COPY_SHARE - 1)
    assert "compute capability 9.0" in on(8, 1 << 60)
    decoder.shard = Shard(0, 2)
    assert "one GPU" in on(9, 1 << 60)
