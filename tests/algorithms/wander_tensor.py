"""`wander` again, as tensor code that a device can run: the same draws, the same destinations."""

from __future__ import annotations

import torch

from algorithms.base import Algorithm, Definition, RouteContext, StepResult
from models.rng import Purpose, uniform_tensor
from tests.algorithms.wander import WanderParams


class WanderTensor(Algorithm):
    def __init__(self, context: RouteContext, params: WanderParams) -> None:
        super().__init__(context, params)
        self.keep_sample = params.keep[context.side]

    def route(self, step: StepResult) -> torch.Tensor:
        draw = uniform_tensor(step.seed, step.choice, step.index, Purpose.USER + self.context.side)
        restless = step.params["restless"].double()
        others = len(self.context.models) - 1
        return torch.where(draw < restless, 1 + (draw / restless * others).long(), 0)


ALGORITHM = Definition("wander_tensor", lambda _: WanderTensor, WanderParams, min_models=1, max_models=8)
