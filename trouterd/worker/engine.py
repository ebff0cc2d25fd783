"""Opens what a worker runs: the model's runner and its KV cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.batch import ModelRunner
from models.config import ModelConfig, ModelError
from models.cuda.products import check_products, shapes_of
from models.defer import defer_row
from models.device_runner import BUCKETS
from models.kv_cache import KvCache
from models.memory import DeviceMemory
from models.parallel.leader import LeadingDecoder, SplitModel
from models.parallel.ranks import Ranks
from models.parallel.split_memory import SplitMemory
from models.script import ScriptRunner
from models.shape import Shape, load_shape
from models.tokenizer import vocabulary_size
from models.torch_runner import TorchRunner
from models.transformers_runner import TransformersRunner
from models.weights import resolve_dtype
from trouterd.config import Config, Model
from trouterd.worker.gpu_check import (
    Host,
    choose_backend,
    device_problem,
    may_use_megakernel,
    memory_problems,
)
from trouterd.worker.gpu_engine import DecoderWeights, GpuEngine, PooledRunner, TorchWeights, Weights
from trouterd.worker.room import gpu_context, model_room, script_room
from trouterd.worker.route import ModelFacts

log = logging.getLogger(__name__)

SHARED_PART = 0.4
"""Of a shared GPU's multiprocessors, what a persistent kernel takes until its step ends. On an H200 a step of 4 rows of Qwen3-0.6B
takes 1.12 ms on 40 % of them and 1.08 on 80 %. Without pause beside steps of Qwen3-32B, which take 18 ms alone, it takes 2.22 and
1.48, and these take 25 and 44: on 40 % more is done in all."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and its KV cache."""

    runner: ModelRunner
    kv: KvCache


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model whose weights are there."""

    facts: ModelFacts
    engine: Engine | GpuEngine
    """On a GPU the KV pool follows when the models that share it have agreed."""
    backend: str
    """'torch', 'flashinfer' or 'script'."""


def load_model(name: str, config: Config, ranks: Ranks | None = None) -> Loaded:
    """Load a model as the configuration says.

    Args:
        name: of the model.
        config: the whole configuration.
        ranks: processes for the other GPUs of a model that is split.

    Raises:
        ModelError, ScriptError: nothing can be served from there; the message names file and field.
        RankLostError: another rank is gone.
    """
    loaded = _load(name, config, ranks)
    model = config.models[name]
    row = None if model.format == "script" or model.load_format == "dummy" else defer_row(Path(model.path))
    if row is None:
        return loaded
    return replace(loaded, facts=replace(loaded.facts, defer=row.to(loaded.facts.device)))


def _load(name: str, config: Config, ranks: Ranks | None) -> Loaded:
    model = config.models[name]
    host = Host.this()
    if problem := device_problem(model, host):
        raise ModelError(f"models.{name}.{problem}")
    torch.set_num_threads(model.threads)
    if model.format == "script":
        return _load_script(name, model)
    shape = load_shape(Path(model.path))
    if not model.gpus:
        return _load_on_cpu(name, model, shape)
    for gpu, problem in memory_problems(config, host):
        if gpu in model.gpus:
            raise ModelError(problem)
    if ranks is not None:
        return _load_split(name, model, shape, host, ranks)
    return _load_on_gpu(name, config, shape, host)


def _load_script(name: str, model: Model) -> Loaded:
    runner = ScriptRunner.load(Path(model.path))
    room = script_room(name, model, runner)
    kv = KvCache(room.pages, room.page_size, model.max_requests, room.context, model.prefix_cache)
    return Loaded(_facts(runner, torch.device(model.device)), Engine(runner, kv), "script")


def _load_on_cpu(name: str, model: Model, shape: Shape) -> Loaded:
    room = model_room(name, model, shape)
    log.info("%s: KV pool of %d tokens, %.0f MiB", name, room.pages * room.page_size, room.kv_bytes / 2**20)
    try:
        runner = open_torch_runner(model, shape, room.pages, room.context)
    except RuntimeError as error:  # torch has no narrower one for memory that it cannot get
        if not _is_lack_of_memory(error):
            raise
        raise ModelError(
            f"models.{name}: not enough memory for the weights and a KV pool of {room.kv_bytes / 2**20:.0f} MiB;"
            " lower kv_tokens or context_length"
        ) from error
    kv = KvCache(room.pages, room.page_size, model.max_requests, room.context, model.prefix_cache)
    return Loaded(_facts(runner, torch.device("cpu")), Engine(runner, kv), "torch")


def _load_on_gpu(name: str, config: Config, shape: Shape, host: Host) -> Loaded:
    model = config.models[name]
    context = gpu_context(name, model, shape)
    backend = choose_backend(name, model, shape, host)
    if backend.why:
        log.warning("%s", backend.why)
    device = torch.device("cuda", model.gpus[0])
    _check_products(name, model, shape, device)
    weights: Weights
    try:
        if backend.name == "torch":
            runner = open_torch_runner(model, shape, _pages(context, model), context)
            weights = TorchWeights(runner, shape.kv_bytes_per_token(model.element_bytes) * model.page_size)
            facts = _facts(runner, device)
        else:
            from models.cuda.decoder import CudaDecoder
            from models.cuda.fast_steps import FastSteps

            vocab_size = vocabulary_size(model.tokenizer_folder)
            decoder = CudaDecoder.load(
                Path(model.path),
                device=device,
                dtype=model.element_type,
                load_format="dummy" if model.load_format == "dummy" else "safetensors",
                page_size=model.page_size,
                vocab_size=vocab_size,
                context_length=context,
            )
            decoder.ragged_prefill &= backend.ragged_prefill
            fast = None
            if may_use_megakernel(name, config, host):
                log.info("%s: small steps run as one kernel", name)
                fast = FastSteps(decoder, kernel_share(name, config))
            weights = DecoderWeights(decoder, model, fast)
            facts = ModelFacts(decoder.vocab_size, decoder.hidden_size, device, decoder.weights.embedding)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"models.{name}.device: the weights do not fit on the GPU: {str(error).partition('. ')[0]}"
        ) from error
    return Loaded(facts, GpuEngine(name, model, weights, context, DeviceMemory(device)), backend.name)


def _check_products(name: str, model: Model, shape: Shape, device: torch.device) -> None:
    """Try the model's products where MPS limits this process. Raises ModelError: they come out wrong."""
    if not isinstance(shape, ModelConfig):
        return
    shapes = shapes_of(shape, vocabulary_size(model.tokenizer_folder))
    kind = resolve_dtype(model.element_type, shape)
    try:
        check_products(device, kind, model.sm_percent, shapes, (*BUCKETS, model.max_batch_tokens))
    except ModelError as error:
        raise ModelError(f"models.{name}.{error}") from error


def _load_split(name: str, model: Model, shape: Shape, host: Host, ranks: Ranks) -> Loaded:
    context = gpu_context(name, model, shape)
    backend = choose_backend(name, model, shape, host)
    if backend.why:
        log.warning("%s", backend.why)
    split = SplitModel(
        path=model.path,
        devices=tuple(f"cuda:{gpu}" for gpu in model.gpus),
        dtype=model.element_type,
        load_format="dummy" if model.load_format == "dummy" else "safetensors",
        page_size=model.page_size,
        vocab_size=vocabulary_size(model.tokenizer_folder),
        context_length=context,
        ragged_prefill=backend.ragged_prefill,
        sm_percent=model.sm_percent,
        step_rows=(*BUCKETS, model.max_batch_tokens),
    )
    try:
        decoder = LeadingDecoder(split, ranks)
    except ModelError as error:
        raise ModelError(f"models.{name}: {error}") from error
    facts = ModelFacts(decoder.vocab_size, decoder.config.hidden_size, decoder.device, decoder.embedding)
    meter = SplitMemory(decoder.device, ranks)
    return Loaded(facts, GpuEngine(name, model, DecoderWeights(decoder, model), context, meter), backend.name)


def kernel_share(name: str, config: Config) -> float:
    """Part of the multiprocessors that a model may use which its persistent kernel takes."""
    model = config.models[name]
    if model.megakernel_percent:
        return model.megakernel_percent / 100
    together = config.batching.overlap and len(config.sharing(model.gpus[0])) > 1
    return SHARED_PART if together else 1.0


def open_torch_runner(model: Model, shape: Shape, pages: int, context: int) -> PooledRunner:
    """A model with weights on the `torch` backend, on any device. Raises ModelError."""
    load = TorchRunner.load if isinstance(shape, ModelConfig) else TransformersRunner.load
    runner: PooledRunner = load(
        Path(model.path),
        device=model.device,
        dtype=model.element_type,
        num_pages=pages,
        page_size=model.page_size,
        vocab_size=vocabulary_size(model.tokenizer_folder),
        context_length=context,
    )
    return runner


def _facts(runner: ModelRunner, device: torch.device) -> ModelFacts:
    return ModelFacts(runner.vocab_size, runner.hidden_size, device, runner.embedding)


def _pages(context: int, model: Model) -> int:
    return -(-context // model.page_size)


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread, which kernels of Triton and CUDA C++ are launched on."""
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        torch.cuda.set_device(device)


def device_answers(device: torch.device) -> bool:
    """False when a fault has left the device's context unusable for this process, so that every later call fails as well."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # torch.AcceleratorError, which older versions do not have
        log.critical("%s answers no more calls", device, exc_info=True)
        return False
    return True


def _is_lack_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
