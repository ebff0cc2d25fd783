"""Which models hand requests to each other, and so have to be planned together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from trouterd.config import Config


@dataclass(frozen=True)
class Group:
    """Models that routes connect, directly or through a third one; an entry comes first."""

    models: tuple[str, ...]
    workers: tuple[int, ...]
    """Worker index of each."""
    shares: tuple[bool, ...]
    """Whether the model has its GPU, or one of them, in common with another model of the group."""
    max_batch: int
    """Most requests of a batch of any of them."""


def groups_of(config: Config) -> list[Group]:
    """All groups of two or more models, in the order of the configuration's routes."""
    parts: list[list[str]] = []
    for route in config.routes.values():
        if len(route.models) < 2:
            continue
        touched = [part for part in parts if set(part) & set(route.models)]
        parts = [part for part in parts if part not in touched]
        merged = [model for part in touched for model in part] + list(route.models)
        parts.append(list(dict.fromkeys(merged)))
    return [_group(part, config) for part in parts]


def _group(names: list[str], config: Config) -> Group:
    models = [config.models[name] for name in names]
    shares = tuple(any(set(a.gpus) & set(b.gpus) for b in models if b is not a) for a in models)
    return Group(
        models=tuple(names),
        workers=tuple(map(config.worker_index, names)),
        shares=shares,
        max_batch=min(min(model.max_requests, model.max_batch_tokens) for model in models),
    )


def fingerprint(config: Config) -> str:
    """Changes with everything that makes learned values worthless: the models, where they run, how they share GPUs, and the routes'
    algorithms."""
    kept = (
        "path",
        "format",
        "device",
        "tensor_parallel",
        "backend",
        "dtype",
        "graphs",
        "extend_graphs",
        "depth",
        "megakernel",
        "megakernel_percent",
        "sm_percent",
        "threads",
    )
    models = {name: [getattr(model, key) for key in kept] for name, model in config.models.items()}
    routes = {name: [route.models, route.algorithm] for name, route in config.routes.items()}
    # Where no model has company on its GPU, kernels of others are not there to be slowed by.
    sharing = config.gpu.mps if config.shared_gpus else ""
    return hashlib.sha256(msgspec.json.encode([models, routes, sharing], order="deterministic")).hexdigest()
