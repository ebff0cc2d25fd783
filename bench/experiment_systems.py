"""Systems under test beside a trouterd that routes."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiment_case import Case, Stage
from bench.experiment_scope import Scope


def step_synchronous(scope: Scope, cases: Sequence[Case]) -> list[Stage]:
    return []
