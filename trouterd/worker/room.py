"""How much a model may hold: its context and its KV pool, worked out from the configuration before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelError
from models.script import ScriptRunner
from models.shape import Shape
from trouterd.config import Model

AUTO_CONTEXTS = 16
"""Full contexts that an automatic KV pool holds."""


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of one worker."""

    context: int
    """Largest prompt + output, tokens."""
    pages: int
    page_size: int
    """Tokens of one page."""
    kv_bytes: int
    """Of all pages; 0 for a script, which has no KV."""


def model_room(name: str, model: Model, shape: Shape) -> Room:
    """Room of a model with weights. Raises ModelError: the configuration asks for what cannot be."""
    context = _context(name, model, shape.context_length)
    bytes_per_token = shape.kv_bytes_per_token(model.element_bytes)
    tokens = model.kv_tokens or min(AUTO_CONTEXTS * context, model.kv_bytes // bytes_per_token)
    pages = tokens // model.page_size
    key = f"models.{name}.{'kv_tokens' if model.kv_tokens else 'kv_bytes'}"
    _require_context(key, pages, model.page_size, context)
    return Room(context, pages, model.page_size, pages * model.page_size * bytes_per_token)


def gpu_context(name: str, model: Model, shape: Shape) -> int:
    """The context of a model whose KV pool is sized when all that it takes is measured. Raises ModelError."""
    context = _context(name, model, shape.context_length)
    if model.kv_tokens:
        _require_context(f"models.{name}.kv_tokens", model.kv_tokens // model.page_size, model.page_size, context)
    return context


def script_room(name: str, model: Model, runner: ScriptRunner) -> Room:
    """Room of a script, whose file says how large its pool is. Raises ModelError."""
    context = _context(name, model, runner.context_length)
    _require_context(f"models.{name}.path: num_pages", runner.num_pages, runner.page_size, context)
    return Room(context, runner.num_pages, runner.page_size, 0)


def _context(name: str, model: Model, longest: int) -> int:
    if model.context_length > longest:
        raise ModelError(f"models.{name}.context_length: {model.context_length}, but the model takes at most {longest}")
    return model.context_length or longest


def _require_context(key: str, pages: int, page_size: int, context: int) -> None:
    if pages * page_size < context:
        raise ModelError(
            f"{key}: {pages} pages of {page_size} tokens cannot hold one context of {context};"
            " raise it or lower context_length"
        )
