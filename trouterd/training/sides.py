"""Algorithms as routes run them, on texts that are written here: what the daemon would decide, and the signal behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from algorithms import uncertainty
from algorithms.base import RouteContext, StepResult
from algorithms.citer import CiterEntry
from algorithms.collm import CollmEntry
from algorithms.query import QueryWeak
from algorithms.r2r import R2REntry
from algorithms.registry import load, numeric_params, validate_params
from models.batch import StepOutput
from trouterd.training.faults import TrainingError
from trouterd.training.pair import Pair
from trouterd.training.reader import Reader
from trouterd.training.signal import Signal, Values
from trouterd.training.writing import Rule
from trouterd.worker.route import build_side

_MEASURES: dict[str, Values] = {
    "entropy": lambda output, _: uncertainty.entropy(output.logits),
    "normalized_entropy": lambda output, _: uncertainty.normalized_entropy(output.logits),
    "confidence": lambda output, _: uncertainty.confidence(output.logits),
    "margin": lambda output, _: uncertainty.margin(output.logits),
    "aleatoric": lambda output, _: uncertainty.aleatoric(output.logits),
    "epistemic": lambda output, _: uncertainty.epistemic(output.logits),
}


class Sides:
    """Both sides of a route.

    Args:
        pair: the route's models.
        names: of the two models.
        algorithm: name or path.
        given: its parameters.

    Raises:
        AlgorithmError: parameters that it does not take, or a checkpoint that does not fit.
    """

    def __init__(self, pair: Pair, names: tuple[str, str], algorithm: str, given: Mapping[str, Any]) -> None:
        definition = load(algorithm)
        self.name = definition.name
        self.params = validate_params(definition, given, names)
        self._numbers = numeric_params(self.params)
        readers = (pair.small, pair.large)
        self.entry, self.peer = (
            build_side(definition, _context(reader, names, side), self.params) for side, reader in enumerate(readers)
        )

    def rule(self) -> Rule:
        """Who writes which token, by the sides' own `route`."""
        return Rule(
            lambda *step: self.entry.route(self._step(*step)) != 0,
            lambda *step: self.peer.route(self._step(*step)) == 0,
        )

    def signal(self) -> Signal:
        """What the algorithm compares its threshold with.

        Raises:
            TrainingError: it has none that could be calibrated.
        """
        self._require_one_threshold()
        params: Any = self.params
        match self.name:
            case "entropy":
                values = _MEASURES[params.measure]
                large = values if params.back == "confident" else None
                return Signal(values, large, rises=params.measure not in ("confidence", "margin"))
            case "rstitch":
                return Signal(self._normalized, self._normalized)
            case "r2r":
                return Signal(self._values(cast("R2REntry", self.entry).probabilities))
            case "citer":
                return Signal(self._values(cast("CiterEntry", self.entry).confidence), rises=False)
            case "collm":
                return Signal(self._values(cast("CollmEntry", self.entry).deferral))
            case "query" if params.source == "hidden":
                return Signal(self._values(cast("QueryWeak", self.entry).scores), once=True)
        raise TrainingError(f"--route: algorithm '{self.name}' has no threshold that text could calibrate")

    def _require_one_threshold(self) -> None:
        """Parameters beside the threshold that would change the share, by algorithm and the value at which they do not."""
        neutral: dict[str, dict[str, object]] = {
            "entropy": {"threshold_back": -1, "epistemic": 0},
            "rstitch": {"checkpoint": ""},
            "collm": {"schedule": "constant"},
        }
        for name, value in neutral.get(self.name, {}).items():
            if getattr(self.params, name) != value:
                raise TrainingError(f"params.{name}: calibration finds one threshold; set it to {value!r} meanwhile")

    def _normalized(self, output: StepOutput, tokens: torch.Tensor) -> torch.Tensor:
        del tokens
        vocab = cast("Any", self.params).vocab or output.logits.shape[-1]
        return (uncertainty.entropy(output.logits) / torch.tensor(float(vocab)).log()).clamp(max=1.0)

    def _values(self, values: Callable[[StepResult], torch.Tensor]) -> Values:
        return lambda output, tokens: values(self._step(output, tokens, torch.zeros_like(tokens)))

    def _step(self, output: StepOutput, tokens: torch.Tensor, index: torch.Tensor) -> StepResult:
        rows = len(tokens)
        return StepResult(
            logits=output.logits,
            hidden=output.hidden,
            tokens=tokens,
            index=index,
            seed=torch.zeros_like(tokens),
            choice=torch.zeros_like(tokens),
            params={name: torch.full((rows,), value, device=tokens.device) for name, value in self._numbers.items()},
            state=[{} for _ in range(rows)],
        )


def _context(reader: Reader, names: tuple[str, str], side: int) -> RouteContext:
    runner = reader.runner
    return RouteContext(
        names, side, runner.vocab_size, runner.hidden_size, reader.device, runner.embedding, reader.defer
    )
