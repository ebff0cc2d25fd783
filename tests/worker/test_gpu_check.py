"""What is said about GPUs before weights are loaded, on hosts that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from models.config import ModelError
from models.shape import load_shape, weight_bytes
from tests.models.foreign import tiny_foreign
from tests.models.tiny import tiny_qwen3
from trouterd.check import deep_problems
from trouterd.config import Config, Gpu, Model, Route
from trouterd.memory import GIB
from trouterd.worker import gpu_check
from trouterd.worker.gpu_check import (
    Backend,
    Host,
    choose_backend,
    device_problem,
    may_use_megakernel,
    memory_problems,
)

H200 = gpu_check.Gpu("NVIDIA H200", (9, 0), 140 * GIB)
OLD = gpu_check.Gpu("Tesla T4", (7, 5), 15 * GIB)


WIDE = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 384}
"""A shape that the megakernel takes."""


def host(*gpus: gpu_check.Gpu, triton: bool = True, flashinfer: str = "") -> Host:
    return Host(gpus or (H200,), triton, flashinfer)


def on_gpu(path: Path | str = "m", device: str = "cuda:0", **keys: object) -> Model:
    return Model(path=str(path), device=device, **keys)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def chosen(model: Model, where: Host) -> Backend:
    return choose_backend("m", model, load_shape(Path(model.path)), where)


@pytest.mark.parametrize(
    ("model", "gpus", "words"),
    [
        (on_gpu(), (), "device: cuda:0, but this host or this build of torch has no CUDA"),
        (on_gpu(device="cuda:2"), (H200, H200), "device: cuda:2, but this host has 2 CUDA devices"),
        (on_gpu(device="cuda:1"), (H200,), "device: cuda:1, but this host has 1 CUDA device"),
        (on_gpu(device="cuda:1", tensor_parallel=2), (H200, H200), "tensor_parallel: GPUs 1 to 2, but this host has 2"),
        (on_gpu(device="cuda", tensor_parallel=2), (H200, H200), ""),
        (on_gpu(device="cpu"), (), ""),
    ],
)
def test_device_that_is_not_there(model: Model, gpus: tuple[gpu_check.Gpu, ...], words: str) -> None:
    assert device_problem(model, Host(gpus, triton=True)) == words


def test_fast_backend_where_it_can_run(directory: Path) -> None:
    assert chosen(on_gpu(directory), host()) == Backend("flashinfer", ragged_prefill=True)
    assert chosen(on_gpu(directory), host(flashinfer="it is away")) == Backend(
        "flashinfer", "models.m: long prompts take longer than they need: it is away"
    )
    assert chosen(Model(path=str(directory)), host()) == Backend("torch")
    slow = chosen(on_gpu(directory, backend="torch"), host())
    assert slow.name == "torch"
    assert "as models.m.backend says" in slow.why


def test_flashinfer_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(gpu_check, "_is_installed", lambda package: package in installed)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert "FlashInfer is not installed" in Host.this().flashinfer
    installed.add("flashinfer")
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert "nvcc is not on the PATH or in CUDA_HOME" in Host.this().flashinfer
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("")
    assert Host.this().flashinfer == ""


def test_why_the_fast_backend_cannot_run(directory: Path, tmp_path: Path) -> None:
    odd = tiny_qwen3(tmp_path / "odd")
    shape = json.loads((odd / "config.json").read_text()) | {"head_dim": 6}
    (odd / "config.json").write_text(json.dumps(shape))
    foreign = tiny_foreign(tmp_path / "foreign", "olmo2")
    cases = [
        (on_gpu(directory), host(OLD), "GPU 0, Tesla T4, has compute capability 7.5, it needs 8.0 or newer"),
        (on_gpu(directory, device="cuda:1"), host(H200, OLD), "GPU 1, Tesla T4, has compute capability 7.5"),
        (on_gpu(directory), host(triton=False), "triton is not installed"),
        (on_gpu(odd), host(), f"{odd}/config.json: head_dim: 6 is not supported"),
        (on_gpu(foreign), host(), "model_type 'olmo2' is only served by transformers' modelling code"),
    ]
    for model, where, words in cases:
        backend = chosen(model, where)
        assert backend.name == "torch"
        assert backend.why.startswith("models.m: the slow torch backend runs it on the GPU: ")
        assert words in backend.why
        forced = Model(path=model.path, device=model.device, backend="flashinfer")
        with pytest.raises(
            ModelError, match=r"^models\.m\.backend: the flashinfer backend cannot run the model: "
        ) as caught:
            chosen(forced, where)
        assert words in str(caught.value)
        dummy = Model(path=model.path, device=model.device, load_format="dummy")
        with pytest.raises(
            ModelError, match=r"^models\.m\.load_format: only the flashinfer backend makes random weights"
        ):
            chosen(dummy, where)


def test_model_that_cannot_be_split(directory: Path) -> None:
    split = on_gpu(directory, tensor_parallel=8)
    with pytest.raises(ModelError, match=r"^models\.m\.tensor_parallel: .*num_.*heads: \d+ cannot be dealt out to 8"):
        chosen(split, host(*[H200] * 8))
    assert chosen(on_gpu(directory, tensor_parallel=2), host(H200, H200)).name == "flashinfer"


def test_weights_that_do_not_fit_name_the_largest(directory: Path, tmp_path: Path) -> None:
    large = tiny_qwen3(tmp_path / "large")
    shape = json.loads((large / "config.json").read_text()) | {"vocab_size": 1 << 21}
    (large / "config.json").write_text(json.dumps(shape))
    size = weight_bytes(large, 2)
    assert size == 2 * load_shape(large).parameters()  # type: ignore[union-attr]
    models = {"small": on_gpu(directory), "large": on_gpu(large), "other": on_gpu(directory, "cuda:1")}
    both = size + weight_bytes(directory, 2)
    exact = host(gpu_check.Gpu("A", (9, 0), both * 2), H200)
    assert list(memory_problems(Config(models=models, gpu=Gpu(memory_fraction=0.5)), exact)) == []
    ((index, line),) = memory_problems(Config(models=models, gpu=Gpu(memory_fraction=0.499)), exact)
    assert index == 0
    assert line.startswith("models.large.device: the weights of the models on GPU 0 (small ")
    assert line.endswith("or raise gpu.memory_fraction above 0.500")
    tight = host(gpu_check.Gpu("A", (9, 0), size - 1))
    ((_, line),) = memory_problems(Config(models={"large": on_gpu(large)}), tight)
    assert "memory_fraction above" not in line
    halves = {"large": on_gpu(large, tensor_parallel=2)}
    assert list(memory_problems(Config(models=halves), host(*tight.gpus * 2))) == []
    floats = {"large": on_gpu(large, dtype="float32")}
    fits = host(gpu_check.Gpu("A", (9, 0), size * 2))
    assert list(memory_problems(Config(models={"large": on_gpu(large)}), fits)) == []
    assert len(list(memory_problems(Config(models=floats), fits))) == 1


def test_one_persistent_kernel_on_a_gpu(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path / "small", **WIDE)
    large = tiny_qwen3(tmp_path / "large", vocab=4000, **WIDE)
    four = host(*[H200] * 4)

    def chosen(where: Host = four, **models: Model) -> list[str]:
        return [name for name in models if may_use_megakernel(name, Config(models=models), where)]

    small, huge = on_gpu(directory), on_gpu(large)
    assert chosen(large=huge, small=small, twin=small) == ["small"]
    assert chosen(small=small, far=on_gpu(large, "cuda:2"), on_cpu=on_gpu(large, "cpu")) == ["small", "far"]
    # The smallest of those that can: not split, not float32, not off, on pages and GPUs that suit it.
    split = on_gpu(directory, tensor_parallel=2)
    changed = [on_gpu(directory, **{key: value}) for key, value in (("dtype", "float32"), ("page_size", 8))]
    for other in (split, *changed, on_gpu(directory, megakernel="off"), on_gpu(directory, backend="torch")):
        assert chosen(small=other, large=huge) == ["large"]
    assert chosen(small=small, large=huge, gone=on_gpu("nowhere")) == ["small"]
    assert chosen(Host((H200,), triton=True, nvcc=False), small=small) == []
    assert chosen(host(gpu_check.Gpu("A100", (8, 0), 80 * GIB)), small=small) == []
    # A GPU that is not there has none, whoever asks.
    assert chosen(host(), small=small, far=on_gpu(large, "cuda:1")) == ["small"]
    assert chosen(small=small, large=on_gpu(large, megakernel="on"), far=on_gpu(large, "cuda:1")) == ["large", "far"]
    parts = [on_gpu(directory, megakernel="on", megakernel_percent=percent) for percent in (20, 80)]
    assert chosen(small=parts[0], large=parts[1], other=small) == ["small", "large"]
    with pytest.raises(ModelError, match=r"models.m.megakernel: .*bfloat16, not float32; set it to 'auto' or 'off'"):
        chosen(m=on_gpu(directory, megakernel="on", dtype="float32"))
    asked = {"m": on_gpu(directory, megakernel="on", page_size=8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "this", lambda: four)
        (problem,) = deep_problems(Config(models=asked))
    assert problem.startswith("models.m.megakernel: it needs pages of a multiple of 16 tokens, not 8")


def test_every_gpu_gives_its_smallest_model_the_kernel(tmp_path: Path) -> None:
    """Also one that routes visit, on a GPU of its own."""
    small = on_gpu(tiny_qwen3(tmp_path / "small", **WIDE))
    large = tiny_qwen3(tmp_path / "large", vocab=4000, **WIDE)
    route = Route(models=["small", "large"], algorithm="entropy")

    def chosen(device: str, **changed: str) -> list[str]:
        models = {"small": msgspec.structs.replace(small, **changed), "large": on_gpu(large, device)}
        config = Config(models=models, routes={"auto": route})
        return [name for name in models if may_use_megakernel(name, config, host(H200, H200))]

    assert chosen("cuda:0") == ["small"]
    assert chosen("cuda:0", megakernel="off") == [], "visits are too large for a part of a GPU"
    assert chosen("cuda:1") == ["small", "large"]


def test_weights_of_other_architectures_are_their_files(tmp_path: Path) -> None:
    foreign = tiny_foreign(tmp_path, "olmo2")
    assert weight_bytes(foreign, 4) == (foreign / "model.safetensors").stat().st_size


def test_check_says_all_of_it(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = tiny_qwen3(tmp_path / "q")
    shape = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (quantised / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(Host, "this", lambda: host(gpu_check.Gpu("A", (7, 5), 1000)))
    models = {
        "far": on_gpu(directory, "cuda:1"),
        "fast": on_gpu(directory, backend="flashinfer"),
        "packed": on_gpu(quantised),
        "long": on_gpu(directory, kv_tokens=64),
    }
    problems = deep_problems(Config(models=models))
    starts = [
        "models.far.device: cuda:1, but this host has 1 CUDA device",
        "models.fast.backend: the flashinfer backend cannot run the model: GPU 0, A, has compute capability 7.5",
        f"models.packed.path: {quantised}/config.json: quantization_config: quantised weights (fp8) are not supported",
        "models.long.kv_tokens: 4 pages of 16 tokens cannot hold one context of",
        "models.packed.device: the weights of the models on GPU 0 (fast ",
    ]
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start), problem
