"""Pairs of models for tests of training."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from trouterd.config import Config
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.settings import load
from trouterd.training.pair import Pair, PairFiles

torch.set_num_threads(1)


def config(
    small: Path = SMALL_DIRECTORY, large: Path = LARGE_DIRECTORY, algorithm: str = "none", **params: object
) -> Config:
    """A route `pair` of two models."""
    models = {"small": {"path": str(small)}, "large": {"path": str(large)}}
    route = {"models": ["small", "large"], "algorithm": algorithm, "params": params}
    return load(None, {}, given={"models": models, "routes": {"pair": route}})


@cache
def demo_pair() -> Pair:
    """The demo pair; answers of up to 128 tokens to prompts of up to 200."""
    return PairFiles.of(config(), "pair").open(texts=16, longest_prompt=200, limit=128)
