"""Drawn routing decisions: at the given rates, beside a head that really runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from algorithms.base import Algorithm, Definition, RouteContext, StepResult
from algorithms.confidence_head import ConfidenceHead
from algorithms.registry import AlgorithmError, load, numeric_params, validate_params
from bench.patterns import PATTERNS, R2R, Pattern
from bench.step_heads import HeadInputs
from trouterd.config import Config, Model, Route
from trouterd.worker.device_route import device_route, impurity
from trouterd.worker.route import ModelFacts, WorkerRoute, build_routes

HIDDEN, VOCAB, ROWS = 16, 64, 20_000
INPUTS = HeadInputs(HIDDEN, HIDDEN, VOCAB)
CHI_SQUARED = 10.83
"""With one degree of freedom: above it once in a thousand."""

COUNTING = """
import torch
from algorithms.base import Algorithm, Definition, NoParams

calls = []

class Side(Algorithm):
    def __init__(self, context, params):
        super().__init__(context, params)
        self.keep_sample = context.side > 0

    def route(self, step):
        calls.append((self.context.side, len(step.tokens)))
        return torch.zeros_like(step.tokens)

ALGORITHM = Definition("counting", lambda _: Side)
"""


def sides(pattern: Pattern, folder: Path) -> list[WorkerRoute]:
    """Both workers' view of a pattern's route."""
    spec = pattern.route_params(folder, INPUTS, "cpu")
    config = Config(
        models={name: Model(path=name) for name in ("small", "large")},
        routes={"routed": Route(models=["small", "large"], algorithm=pattern.algorithm_path, params=spec)},
    )
    facts = ModelFacts(VOCAB, HIDDEN, torch.device("cpu"), torch.randn(VOCAB, HIDDEN))
    ends = dict.fromkeys(("small", "large"), frozenset({1}))
    return [build_routes(config, name, facts, ends)["routed"] for name in ("small", "large")]


def step(route: WorkerRoute, rows: int = ROWS) -> StepResult:
    """Rows of 200 requests at their first, second, ... output index."""
    return StepResult(
        logits=torch.randn(1, VOCAB).expand(rows, VOCAB),
        hidden=torch.randn(1, HIDDEN).expand(rows, HIDDEN),
        tokens=torch.zeros(rows, dtype=torch.int64),
        index=torch.arange(rows) // 200,
        seed=torch.arange(rows) % 200,
        choice=torch.zeros(rows, dtype=torch.int64),
        params={name: torch.full((rows,), value) for name, value in route.params.items()},
        state=[],
    )


def chi_squared(hits: int, rows: int, rate: float) -> float:
    expected = rows * rate
    return (hits - expected) ** 2 / expected + (hits - expected) ** 2 / (rows - expected)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.key)
def test_rates(pattern: Pattern, tmp_path: Path) -> None:
    small, large = sides(pattern, tmp_path)
    there, back = (route.algorithm.route(step(route)) for route in (small, large))
    assert set(there.tolist()) == {0, 1}
    assert chi_squared(int(there.sum()), ROWS, pattern.p) < CHI_SQUARED
    if pattern.q == 1:
        assert back.tolist() == [1] * ROWS
    else:
        assert chi_squared(int(back.sum()), ROWS, pattern.q) < CHI_SQUARED
        # At an index that it was given, the peer's draw is a new one.
        routed = back[there == 1]
        assert chi_squared(int(routed.sum()), len(routed), pattern.q) < CHI_SQUARED
    assert (small.algorithm.keep_sample, large.algorithm.keep_sample) == (False, True)


@pytest.mark.parametrize(("p", "side"), [(0.35, 0), (0.1, 0), (0.54, 0), (0.177, 1)])
def test_every_block_has_its_rate_and_runs_are_those_of_independent_draws(p: float, side: int) -> None:
    answers, blocks = 200, 4
    count = 256 * blocks
    params: dict[str, object] = {"p": p, "q": p}
    algorithm = built_side(load(R2R.algorithm_path), params, side)
    one = step_of(algorithm, params, answers * count)
    rows = torch.arange(answers * count)
    step = replace(one, seed=rows // count * 0x5851F42D4C957F2D, index=rows % count, choice=torch.zeros_like(rows))
    moved = (algorithm.route(step) > 0).view(answers, count)
    each = moved.view(-1, 256).sum(1)
    assert set(each.tolist()) <= {math.floor(256 * p), math.ceil(256 * p)}
    assert each.double().mean() == pytest.approx(256 * p, abs=0.1)
    assert len({tuple(row) for row in moved.tolist()}) == answers
    # From one move to the next: k steps with probability p (1 - p)^(k - 1).
    runs = torch.cat([row.nonzero().flatten().diff() for row in moved])
    for length in (1, 2, 3, 5):
        expected = p * (1 - p) ** (length - 1)
        assert (runs == length).double().mean() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.key)
def test_a_device_can_take_it(pattern: Pattern, tmp_path: Path) -> None:
    """Whatever a graph could not hold would be found here, in the named algorithm too."""
    for route in sides(pattern, tmp_path):
        assert impurity(route) == ""
        assert device_route(route).params == ("p", "q")


def test_the_named_head_runs_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    head = ConfidenceHead.__call__

    def counted(self: ConfidenceHead, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return head(self, hidden)

    monkeypatch.setattr(ConfidenceHead, "__call__", counted)
    (pattern,) = (pattern for pattern in PATTERNS if pattern.head == "citer")
    small, large = sides(pattern, tmp_path)
    for rows in (3, 5):
        small.algorithm.route(step(small, rows))
        large.algorithm.route(step(large, rows))
    assert seen == [3, 5]


def test_both_sides_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "counting.py"
    file.write_text(COUNTING)
    drawn = load(R2R.algorithm_path)
    params = {"p": 0.3, "q": 0.5, "head": str(file)}
    built = [built_side(drawn, params, side) for side in (0, 1)]
    for algorithm in built:
        answer = algorithm.route(step_of(algorithm, params, 4))
        assert answer.shape == (4,)
        assert type(algorithm._head).route.__globals__["calls"] == [(algorithm.context.side, 4)]  # type: ignore[attr-defined]


def built_side(definition: Definition, params: dict[str, object], side: int) -> Algorithm:
    models = ("small", "large")
    context = RouteContext(models, side, VOCAB, HIDDEN, torch.device("cpu"))
    return definition.sides(side)(context, validate_params(definition, params, models))


def step_of(algorithm: Algorithm, params: dict[str, object], rows: int) -> StepResult:
    numbers = numeric_params(algorithm.params)
    count = torch.arange(rows)
    return StepResult(
        logits=torch.zeros(rows, VOCAB),
        hidden=torch.zeros(rows, HIDDEN),
        tokens=count,
        index=count,
        seed=count,
        choice=count,
        params={name: torch.full((rows,), value) for name, value in numbers.items()},
        state=[],
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"p": 0.5, "head": "rstitsch"}, "head: unknown algorithm 'rstitsch'"),
        ({"p": 0.5, "head": "rstitch"}, "settings: .* needs the parameter 'tau'"),
        ({"p": 0.5, "head": "speculative"}, "head: speculative drafts"),
        ({"p": 1.5}, "parameter 'p'"),
        ({"p": 0.5, "threshold": 1}, "no parameter 'threshold'"),
    ],
)
def test_what_is_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        validate_params(load(R2R.algorithm_path), params, ("small", "large"))
