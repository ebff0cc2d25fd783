"""Heads that several tests look at are trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.training.pairs import config
from trouterd.training.options import ALGORITHMS, AlgorithmName, PairOptions, TrainOptions
from trouterd.training.train import Run

Trained = dict[AlgorithmName, tuple[Path, dict[str, Any]]]
"""Checkpoint and sidecar by algorithm."""


def options(output: Path, algorithm: AlgorithmName = "collm", **changes: Any) -> TrainOptions:
    """A short training on a few demo problems."""
    pair = PairOptions(prompts="demo:14", max_tokens=128, seed=changes.pop("seed", 0))
    short = {"pair": pair, "epochs": 3, "recall": 0.8, "report_prompts": 2}
    return TrainOptions(algorithm=algorithm, output=output, **(short | changes))


def train(output: Path, algorithm: AlgorithmName = "collm", **changes: Any) -> dict[str, Any]:
    """The sidecar of a run."""
    sidecar = Run(config(), "pair", options(output, algorithm, **changes)).run()
    written: dict[str, Any] = msgspec.json.decode(output.with_name(f"{output.name}.json").read_bytes())
    assert written == msgspec.to_builtins(sidecar)
    return written


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A head of each algorithm."""
    folder = tmp_path_factory.mktemp("trained")
    return {algorithm: (folder / algorithm, train(folder / algorithm, algorithm)) for algorithm in ALGORITHMS}
