"""No routing: every token stays with the model that has the request, which is the entry.

Takes any number of models, so that the other models of a route can stay in the configuration while routing is off.
"""

from __future__ import annotations

import torch

from algorithms.base import MOST_MODELS, Algorithm, Definition, StepResult


class Stay(Algorithm):
    """Both families at once: nothing is ever handed over."""

    warms_peers = False

    def route(self, step: StepResult) -> torch.Tensor:
        """Always 0."""
        return torch.zeros_like(step.tokens)


def _side(index: int) -> type[Algorithm]:
    del index
    return Stay


ALGORITHM = Definition("none", _side, min_models=1, max_models=MOST_MODELS)
