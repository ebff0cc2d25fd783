"""What a configuration asks of GPUs against what this host has: everything that can be said before any weight is read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelConfig, ModelError
from models.cuda.nvcc import find_nvcc
from models.shape import Shape, load_shape
from models.weights import DTYPES
from trouterd.config import Config, Model
from trouterd.memory import gib, weights_per_gpu

LEAST_CAPABILITY = (8, 0)
"""Of the flashinfer backend: asynchronous copies and bfloat16 tensor cores."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host."""

    name: str
    capability: tuple[int, int]
    """Compute capability."""
    memory: int
    """Bytes, used ones among them."""


@dataclass(frozen=True, slots=True)
class Host:
    """GPUs by index, and what the flashinfer backend is made of."""

    gpus: tuple[Gpu, ...]
    triton: bool
    flashinfer: str = ""
    """Why FlashInfer cannot be used; '' if it can."""
    nvcc: bool = True
    """The megakernel can be compiled."""

    @classmethod
    def this(cls) -> Host:
        """The host that we are on."""
        gpus = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            facts = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(facts.name, (facts.major, facts.minor), facts.total_memory))
        return cls(tuple(gpus), _is_installed("triton"), _flashinfer_problem(), find_nvcc() is not None)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _flashinfer_problem() -> str:
    if not _is_installed("flashinfer"):
        return "FlashInfer is not installed; install trouterd[cuda]"
    if find_nvcc() is None:
        return "FlashInfer's kernels are compiled at the first start, and nvcc is not on the PATH or in CUDA_HOME"
    return ""


@dataclass(frozen=True, slots=True)
class Backend:
    """Who runs a model."""

    name: str
    """'torch' or 'flashinfer'."""
    why: str = ""
    """A line for the log where it is not what one would expect."""
    ragged_prefill: bool = False
    """FlashInfer runs long prompts."""


def device_problem(model: Model, host: Host) -> str:
    """Which key asks for a GPU that is not there, and why; '' if none does."""
    device = torch.device(model.device)
    if device.type != "cuda":
        return ""
    count = len(host.gpus)
    if not count:
        return f"device: {model.device}, but this host or this build of torch has no CUDA"
    if (device.index or 0) >= count:
        return f"device: {model.device}, but this host has {count} CUDA device{'s' * (count > 1)}"
    if model.gpus and model.gpus[-1] >= count:
        return f"tensor_parallel: GPUs {model.gpus[0]} to {model.gpus[-1]}, but this host has {count}"
    return ""


def choose_backend(name: str, model: Model, shape: Shape, host: Host) -> Backend:
    """The backend of a model whose device is there.

    Raises:
        ModelError: the one that is asked for cannot run the model.
    """
    if not model.gpus:
        return Backend("torch")
    backend = _best_backend(name, model, shape, host)
    if backend.name == "torch" and model.load_format == "dummy":
        raise ModelError(f"models.{name}.load_format: only the flashinfer backend makes random weights; {backend.why}")
    return backend


def _best_backend(name: str, model: Model, shape: Shape, host: Host) -> Backend:
    obstacle = _obstacle(model, shape, host)
    if obstacle and (model.backend == "flashinfer" or model.tensor_parallel > 1):
        key = "backend" if model.backend == "flashinfer" else "tensor_parallel"
        raise ModelError(f"models.{name}.{key}: the flashinfer backend cannot run the model: {obstacle}")
    if model.backend == "torch":
        return Backend(
            "torch", f"models.{name}: the slow torch backend runs it on the GPU, as models.{name}.backend says"
        )
    if obstacle:
        return Backend("torch", f"models.{name}: the slow torch backend runs it on the GPU: {obstacle}")
    if host.flashinfer:
        return Backend("flashinfer", f"models.{name}: long prompts take longer than they need: {host.flashinfer}")
    return Backend("flashinfer", ragged_prefill=True)


def _obstacle(model: Model, shape: Shape, host: Host) -> str:
    """Why the flashinfer backend cannot run a model; '' if it can."""
    if not isinstance(shape, ModelConfig):
        return f"model_type {shape.family!r} is only served by transformers' modelling code"
    if not host.triton:
        return "triton is not installed; install trouterd[cuda]"
    for index in model.gpus:
        gpu = host.gpus[index]
        if gpu.capability < LEAST_CAPABILITY:
            have, least = (".".join(map(str, pair)) for pair in (gpu.capability, LEAST_CAPABILITY))
            return f"GPU {index}, {gpu.name}, has compute capability {have}, it needs {least} or newer"
    from models.cuda.shard import Shard
    from models.cuda.support import check_model

    source = str(Path(model.path) / "config.json")
    try:
        check_model(shape, source, model.page_size)
        Shard(0, model.tensor_parallel).check(shape, source)
    except ModelError as error:
        return str(error)
    return ""


def may_use_megakernel(name: str, config: Config, host: Host) -> bool:
    """Whether a model's small steps run as one persistent kernel. Every model of a GPU finds the same answer on its own.

    The kernel's blocks wait for each other, so that all of them must be on the GPU at once. Two such kernels side by side
    could each hold what the other waits for: of models that share a GPU those get it that say "on", several only on parts that
    add up to one GPU, or where models take turns; if none does, the one with the fewest weights: it takes most steps, and gains
    most where steps are short. A model that routes visit feeds some tokens of every request at once, more rows than a part of a
    GPU is fast at: where it shares one, it has to say "on".

    Raises:
        ModelError: the model says "on" and cannot, with the reason.
    """
    model = config.models[name]
    if model.megakernel == "on":
        if problem := megakernel_problem(model, host):
            raise ModelError(f"models.{name}.megakernel: {problem}; set it to 'auto' or 'off'")
        return True
    return bool(model.gpus) and name in _megakernel_owners(config, model.gpus[0], host)


def _megakernel_owners(config: Config, gpu: int, host: Host) -> tuple[str, ...]:
    """The models of a GPU that have the persistent kernel."""
    models = {name: config.models[name] for name in config.sharing(gpu)}
    if asked := tuple(name for name, model in models.items() if model.megakernel == "on"):
        return asked
    visited = {name for route in config.routes.values() for name in route.models[1:]} if len(models) > 1 else set()
    found = [
        name
        for name, model in models.items()
        if model.megakernel == "auto" and name not in visited and not megakernel_problem(model, host)
    ]
    return tuple(sorted(found, key=lambda name: weights_per_gpu(models[name]))[:1])


def megakernel_problem(model: Model, host: Host) -> str:
    """Why small steps of a model on a GPU of this host cannot run as one persistent kernel; '' if they can."""
    if not model.gpus:
        return "it is for models on a GPU"
    if problem := device_problem(model, host):
        return problem
    if model.tensor_parallel > 1:
        return "it runs models on one GPU"
    if model.backend == "torch":
        return "the torch backend does not have it"
    try:
        shape = load_shape(Path(model.path))
    except ModelError as error:
        return str(error)
    reason = _obstacle(model, shape, host)
    if reason or not isinstance(shape, ModelConfig):
        return f"it needs the flashinfer backend: {reason}"
    if not host.nvcc:
        return "nvcc, which compiles it, is not on the PATH or in CUDA_HOME"
    from models.cuda.megakernel import KEY_TILE, unsupported

    if model.page_size % KEY_TILE:
        return f"it needs pages of a multiple of {KEY_TILE} tokens, not {model.page_size}"
    return unsupported(shape, DTYPES[model.element_type], host.gpus[model.gpus[0]].capability)


def memory_problems(config: Config, host: Host) -> Iterator[tuple[int, str]]:
    """GPUs whose models' weights alone are more than the models may take: index and one line, naming the largest model."""
    for index in sorted({gpu for model in config.models.values() for gpu in model.gpus}):
        if index >= len(host.gpus):
            continue
        taken = {name: weights_per_gpu(config.models[name]) for name in config.sharing(index)}
        total, need = host.gpus[index].memory, sum(taken.values())
        if need > total * config.gpu.memory_fraction:
            largest = max(taken, key=lambda name: taken[name])
            held = ", ".join(f"{name} {gib(size)}" for name, size in taken.items())
            advice = "take a smaller one or split it (tensor_parallel)"
            if need < total:
                advice += f", or raise gpu.memory_fraction above {need / total:.3f}"
            yield (
                index,
                f"models.{largest}.device: the weights of the models on GPU {index} ({held}) do not fit into"
                f" {config.gpu.memory_fraction:g} of its {gib(total)}; {advice}",
            )
