"""Opens what a worker runs: the model's runner, its KV cache and the ids that end an answer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from models.batch import ModelRunner
from models.config import ModelConfig, ModelError
from models.kv_cache import KvCache
from models.script import ScriptRunner
from models.tokenizer import Tokenizer, vocabulary_size
from models.torch_runner import TorchRunner
from trouterd.config import Config, Model

log = logging.getLogger(__name__)

AUTO_CONTEXTS = 16
"""Full contexts that an automatic KV pool holds."""


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
    torch.set_num_threads(model.threads)
    runner: ModelRunner
    if model.format == "script":
        runner = ScriptRunner.load(Path(model.path))
        context = _context(name, model, runner.context_length)
    else:
        path = Path(model.path)
        shape = ModelConfig.load(path)
        context = _context(name, model, shape.context_length)
        pages = _num_pages(name, model, shape.kv_bytes_per_token(_element_size(model)), context)
        runner = TorchRunner.load(
            path,
            device=model.device,
            dtype=model.dtype,
            num_pages=pages,
            page_size=model.page_size,
            vocab_size=vocabulary_size(tokenizer_folder(model)),
            context_length=context,
        )
    kv = KvCache(runner.num_pages, runner.page_size, model.max_requests, context, model.prefix_cache)
    if kv.capacity_tokens < context:
        raise ModelError(
            f"models.{name}.kv_tokens: {kv.capacity_tokens} tokens cannot hold one context of {context};"
            f" raise kv_tokens or lower context_length"
        )
    return Engine(runner, kv, torch.device(model.device))


def end_ids(config: Config) -> dict[str, frozenset[int]]:
    """The ids that end an answer, for every model: all workers of a route must agree on them.

    Raises:
        ModelError: a tokenizer or configuration file that cannot be read.
    """
    return {name: Tokenizer.load(tokenizer_folder(model)).eos_ids for name, model in config.models.items()}


def tokenizer_folder(model: Model) -> Path:
    """Where a model's tokenizer lies."""
    return Path(model.tokenizer or model.path)


def _context(name: str, model: Model, longest: int) -> int:
    if model.context_length > longest:
        raise ModelError(f"models.{name}.context_length: {model.context_length}, but the model takes at most {longest}")
    return model.context_length or longest


def _num_pages(name: str, model: Model, bytes_per_token: int, context: int) -> int:
    tokens = model.kv_tokens
    if tokens == 0:
        tokens = min(AUTO_CONTEXTS * context, model.kv_bytes // bytes_per_token)
        log.info("%s: KV pool of %d tokens, %.0f MiB", name, tokens, tokens * bytes_per_token / 2**20)
    return tokens // model.page_size


def _element_size(model: Model) -> int:
    return 2 if model.dtype == "bfloat16" else 4
