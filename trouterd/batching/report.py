"""What a worker tells the controller of delayed batching."""

from __future__ import annotations

import msgspec

STEPS = 2048
"""Of a report at most: the latest ones."""


class Step(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A step of a model."""

    begin: float
    """Seconds of CLOCK_MONOTONIC, which all processes of a host share."""
    seconds: float
    """Until the model could take the next one."""
    requests: int
    """Without those that had left in the step before, whose rows were dead. 0: there was no other, or the step fed a part of a
    prompt; it tells no step time, but slows others down."""


class Report(msgspec.Struct, frozen=True):
    """Counts since the worker's start, and the steps since the last report."""

    now: float
    """When it was made, seconds of CLOCK_MONOTONIC."""
    since: float
    """When the worker's counts began: another time means another worker process, whatever the counts are."""
    active: int
    """Active requests whose route includes the model."""
    version: int
    """Of the lists that the controller has sent; 0: none."""
    tokens: int
    """Output tokens that the model wrote and committed."""
    decisions: int
    """Requests' steps that gave a token, kept or not."""
    moves: dict[int, int]
    """Hand-offs by the receiver's worker index."""
    runs: dict[int, int]
    """Hand-offs by the steps that the request took here before."""
    steps: list[Step]
    """The latest `STEPS`, in order."""
    waited: int = 0
    """Steps for which the model, idle, had waited for hand-offs."""
    waited_seconds: float = 0.0
    """From the sending of the last of those to the launch, sum over these steps."""
    handed: int = 0
    """Steps that handed requests over."""
    handed_seconds: float = 0.0
    """From the sending of the last hand-off to the end of the step, sum over these steps; less than 0 of one with another queued
    behind it, which ends before the sending."""
    prompt_seconds: float = 0.0
    """Of steps that fed a part of a prompt."""


class Lists(msgspec.Struct, frozen=True):
    """What the controller tells workers."""

    version: int = 0
    """Rises with every change."""
    thresholds: dict[str, list[int]] = {}
    """B[n] from n = 1 on, by model; a model that is not here launches whatever is ready."""
    lingers: dict[str, float] = {}
    """Seconds, by model."""
