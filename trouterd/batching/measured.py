"""Step times from a file that `python -m bench.step --json FILE` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from trouterd.batching.network import NetworkError, StepTime
from trouterd.batching.row_time import Extends, RowTime


class _Case(msgspec.Struct):
    """One batch size at one context."""

    batch: Annotated[int, Meta(ge=1)]
    context: int
    wall_ms: Annotated[float, Meta(gt=0)]


class _Extend(_Case):
    """The same with several new tokens of each request."""

    count: Annotated[int, Meta(ge=1)]


class _Model(msgspec.Struct, frozen=True):
    """Of the file."""

    name: str = ""


class _Result(msgspec.Struct):
    """The part of the file that is used."""

    decode: list[_Case]
    extend: list[_Extend] = []
    model: _Model = _Model()


@dataclass(frozen=True)
class Measured:
    """What a file says."""

    model: str
    """Name of the shape, or of the checkpoint's folder; '' where it says none."""
    time: RowTime


def read_step_time(path: Path, context: int | None = None) -> Measured:
    """Time of a step by batch size, and by new tokens where extend steps were measured.

    Args:
        path: JSON of the bench.
        context: tokens; the nearest measured context is taken. None: the shortest one. What extend steps take more than decode
            steps is taken from their own context.

    Raises:
        NetworkError: the file cannot be read, or has no decode steps.
    """
    try:
        result = msgspec.convert(json.loads(path.read_text()), _Result)
    except OSError as error:
        raise NetworkError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise NetworkError(f"{path}: not a result of bench.step with decode steps: {error}") from error
    if not result.decode:
        raise NetworkError(f"{path}: no decode step was measured; run bench.step with the section 'decode'")
    decode = _by_context(result.decode)
    time = RowTime(decode[_nearest(decode, context)], _extends(result.extend, decode, context))
    return Measured(Path(result.model.name).name, time)


def _nearest(contexts: Iterable[int], wanted: int | None) -> int:
    if wanted is None:
        return min(contexts)
    return min(contexts, key=lambda found: (abs(found - wanted), found))


def _by_context(cases: Sequence[_Case]) -> dict[int, StepTime]:
    """Decode steps of each context, by rising context."""
    found: dict[int, dict[float, float]] = {}
    for case in cases:
        found.setdefault(case.context, {})[float(case.batch)] = case.wall_ms / 1e3
    return {context: StepTime(tuple(sorted(points.items()))) for context, points in sorted(found.items())}


def _extends(cases: Sequence[_Extend], decode: Mapping[int, StepTime], wanted: int | None) -> Extends | None:
    """What they take more than a step of one row per request at the same context."""
    if all(case.count == 1 for case in cases):
        return None
    context = _nearest({case.context for case in cases if case.count > 1}, wanted)
    seconds = {(case.batch, case.count): case.wall_ms / 1e3 for case in cases if case.context == context}

    def one_row(batch: int) -> float:
        between = float(np.interp(context, list(decode), [time.of(batch) for time in decode.values()]))
        return seconds.get((batch, 1), between)

    return Extends(
        tuple((batch, count, max(0.0, step - one_row(batch))) for (batch, count), step in seconds.items() if count > 1)
    )
