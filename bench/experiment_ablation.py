"""Experiment b: what each part of the engine is worth."""

from __future__ import annotations

from bench.experiment_case import Stage
from bench.experiment_scope import Scope


def stages(scope: Scope) -> list[Stage]:
    """One daemon per part that can only be off from the start."""
    raise NotImplementedError(scope)
