"""The threshold of a trained head: set, calibrated by its trainer, or the default of a paper that its own code contradicts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from algorithms.checkpoint import Sidecar

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fallback:
    """What is taken where nobody has calibrated anything."""

    value: float
    source: str


def calibrated(
    algorithm: str, given: float, checkpoint: Path | None, sidecar: Sidecar | None, fallback: Fallback
) -> float:
    """What a threshold below 0 means; says in the log which value is in force and where it comes from.

    Args:
        algorithm: its name, for the log.
        given: the configured threshold.
        checkpoint: the head's file.
        sidecar: what lies beside it.
        fallback: used without a sidecar.
    """
    value = fallback.value if sidecar is None else sidecar.threshold
    if given >= 0:
        log.info("%s: threshold %g, as configured", algorithm, given)
    elif sidecar is not None:
        log.info("%s: threshold %g, calibrated: %s.json", algorithm, value, checkpoint)
    else:
        log.warning(
            "%s: threshold %g, %s; nobody has calibrated it for these models", algorithm, value, fallback.source
        )
    return value


def in_force(given: torch.Tensor, calibrated: float) -> torch.Tensor:
    """[R] thresholds of rows whose parameter is `given` [R]."""
    return given.where(given >= 0, calibrated)
