"""Opens what a worker runs: the model's runner and its KV cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from models.batch import ModelRunner
from models.config import ModelConfig, ModelError
from models.kv_cache import KvCache
from models.script import ScriptRunner
from models.shape import load_shape
from models.tokenizer import vocabulary_size
from models.torch_runner import TorchRunner
from models.transformers_runner import TransformersRunner
from trouterd.config import Model
from trouterd.worker.room import model_room, script_room

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and its KV cache."""

    runner: ModelRunner
    kv: KvCache
    device: torch.device


def open_engine(name: str, model: Model) -> Engine:
    """Load a model as the configuration says.

    Raises:
        ModelError, ScriptError: nothing can be served from there; the message names file and field.
    """
    if problem := device_problem(model):
        raise ModelError(f"models.{name}.device: {problem}")
    torch.set_num_threads(model.threads)
    runner: ModelRunner
    if model.format == "script":
        runner = ScriptRunner.load(Path(model.path))
        room = script_room(name, model, runner)
    else:
        path = Path(model.path)
        shape = load_shape(path)
        room = model_room(name, model, shape)
        log.info("%s: KV pool of %d tokens, %.0f MiB", name, room.pages * room.page_size, room.kv_bytes / 2**20)
        load = TorchRunner.load if isinstance(shape, ModelConfig) else TransformersRunner.load
        try:
            runner = load(
                path,
                device=model.device,
                dtype=model.dtype,
                num_pages=room.pages,
                page_size=room.page_size,
                vocab_size=vocabulary_size(model.tokenizer_folder),
                context_length=room.context,
            )
        except RuntimeError as error:  # torch has no narrower one for memory that it cannot get
            if not _is_lack_of_memory(error):
                raise
            raise ModelError(
                f"models.{name}: not enough memory for the weights and a KV pool of {room.kv_bytes / 2**20:.0f} MiB;"
                " lower kv_tokens or context_length"
            ) from error
    kv = KvCache(room.pages, room.page_size, model.max_requests, room.context, model.prefix_cache)
    return Engine(runner, kv, torch.device(model.device))


def device_problem(model: Model) -> str:
    """Why the model cannot run on its device; '' if it can."""
    device = torch.device(model.device)
    if device.type != "cuda":
        return ""
    if not torch.cuda.is_available():
        return f"{model.device}, but this host or this build of torch has no CUDA"
    if (device.index or 0) >= torch.cuda.device_count():
        return f"{model.device}, but this host has {torch.cuda.device_count()} CUDA devices"
    return ""


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
