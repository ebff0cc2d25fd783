"""What the command line of `trouterd train` and `trouterd calibrate` says; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

AlgorithmName = Literal["citer", "r2r", "collm", "query"]
ALGORITHMS: tuple[AlgorithmName, ...] = ("citer", "r2r", "collm", "query")
DEFAULT_RECALL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """Which texts are read and how."""

    prompts: str
    seed: int = 0
    max_tokens: int = 256
    """Of one answer."""
    texts: int = 64
    """Read at once."""
    limit: int = 0
    """Prompts that are used, the first ones; 0 = all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One run of `trouterd train`."""

    algorithm: AlgorithmName
    output: Path
    pair: PairOptions
    share: float | None = None
    recall: float | None = None
    """With neither: DEFAULT_RECALL."""
    fresh: bool = False
    judge: Literal["answer", "text"] = "answer"
    rounds: int = 2
    """citer: labelling rounds."""
    width: int = 0
    """r2r: of its blocks; 0: by the small model."""
    blocks: int = 0
    """r2r; 0: by the small model."""
    epochs: int = 0
    """0: the algorithm's own number."""
    rate: float = 0.0
    """0: the algorithm's own."""
    batch: int = 0
    """Rows of a training step; 0: the algorithm's own."""
    patience: int = 10
    fine_tune: bool = False
    """collm: the small model learns too."""
    threads: int = 1
    """Of the training loop, on a CPU."""
    report_prompts: int = 200
    """Held-out prompts that are answered for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """One run of `trouterd calibrate`."""

    pair: PairOptions
    share: float
    json: bool = False
