"""The threshold of a trained head: set by the configuration, calibrated by its trainer, or a default that papers disagree on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from algorithms.registry import AlgorithmError

log = logging.getLogger(__name__)


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """What `<checkpoint>.json` says of a trained head; further fields are its trainer's own."""

    algorithm: str
    model: str
    """The small model that it was trained for, as its trainer was given it."""
    hidden_size: int
    threshold: float
    """The calibrated one."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value, and where it comes from."""

    value: float
    source: str


def sidecar_threshold(checkpoint: Path, key: str, hidden_size: int, algorithms: tuple[str, ...]) -> Threshold | None:
    """The threshold that lies beside a checkpoint in `<checkpoint>.json`; None where nothing does.

    Args:
        checkpoint: the head's file.
        key: the parameter that names it, for messages.
        hidden_size: of the model that it is to serve.
        algorithms: what the head may have been trained for.

    Raises:
        AlgorithmError: not such a file, or one of another algorithm or hidden size.
    """
    path = checkpoint.with_name(f"{checkpoint.name}.json")

    def error(problem: object) -> AlgorithmError:
        return AlgorithmError(f"{key}: {path}: {problem}", key)

    try:
        sidecar = msgspec.json.decode(path.read_bytes(), type=Sidecar)
    except FileNotFoundError:
        return None
    except OSError as wrong:
        raise error(wrong.strerror or wrong) from wrong
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise error(wrong) from wrong
    if sidecar.algorithm not in algorithms:
        raise error(f"algorithm: {sidecar.algorithm!r}; the head must be one of {' or '.join(algorithms)}")
    if sidecar.hidden_size != hidden_size:
        raise error(f"hidden_size: {sidecar.hidden_size}, of {sidecar.model!r}; the entry model has {hidden_size}")
    if not 0 <= sidecar.threshold <= 1:
        raise error(f"threshold: {sidecar.threshold}; must be 0 to 1")
    return Threshold(sidecar.threshold, f"calibrated in {path}")


def choose(algorithm: str, given: float, calibrated: Threshold | None, fallback: Threshold) -> float:
    """What a threshold below 0 means; the log says which value is in force and where it comes from.

    Args:
        algorithm: its name, for the log.
        given: the configured threshold.
        calibrated: what came with the head.
        fallback: used where nothing did.
    """
    chosen = fallback if calibrated is None else calibrated
    if given >= 0:
        log.info("%s: threshold %g, as configured", algorithm, given)
    else:
        level = logging.WARNING if calibrated is None else logging.INFO
        log.log(level, "%s: threshold %g, %s", algorithm, chosen.value, chosen.source)
    return chosen.value


def probability(logit: torch.Tensor) -> torch.Tensor:
    """[R] sigmoid, spelt out: torch's own kernel rounds the last elements of a buffer differently on a CPU."""
    return logit.neg().exp_().add_(1.0).reciprocal_()


def in_force(given: torch.Tensor, chosen: float) -> torch.Tensor:
    """[R] thresholds of rows whose parameter is `given` [R]."""
    return given.where(given >= 0, chosen)
