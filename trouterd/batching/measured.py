"""Step times from a file that `python -m bench.step --json FILE` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from trouterd.batching.network import NetworkError, StepTime


class _Case(msgspec.Struct):
    """One batch size at one context."""

    batch: Annotated[int, Meta(ge=1)]
    context: int
    wall_ms: Annotated[float, Meta(gt=0)]


class _Model(msgspec.Struct, frozen=True):
    """Of the file."""

    name: str = ""


class _Result(msgspec.Struct):
    """The part of the file that is used."""

    decode: list[_Case]
    model: _Model = _Model()


@dataclass(frozen=True)
class Measured:
    """What a file says."""

    model: str
    """Name of the shape, or of the checkpoint's folder; '' where it says none."""
    step_time: StepTime


def read_step_time(path: Path, context: int | None = None) -> Measured:
    """Time of a decode step by batch size.

    Args:
        path: JSON of the bench.
        context: tokens; the nearest measured context is taken. None: the shortest one.

    Raises:
        NetworkError: the file cannot be read, or has no decode steps.
    """
    try:
        result = msgspec.convert(json.loads(path.read_text()), _Result)
    except OSError as error:
        raise NetworkError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise NetworkError(f"{path}: not a result of bench.step with decode steps: {error}") from error
    contexts = {case.context for case in result.decode}
    if not contexts:
        raise NetworkError(f"{path}: no decode step was measured; run bench.step with the section 'decode'")
    nearest = min(contexts) if context is None else min(contexts, key=lambda found: (abs(found - context), found))
    cases = {case.batch: case.wall_ms / 1e3 for case in result.decode if case.context == nearest}
    points = tuple(sorted((float(batch), seconds) for batch, seconds in cases.items()))
    return Measured(Path(result.model.name).name, StepTime(points))
