"""Which algorithms a device may decide: built-in ones all, users' by what their code does with tensors that have no values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.resident import RoutedRows
from tests.harness import Cluster
from tests.worker.lookup import LookupRunner
from tests.worker.test_oracle import CASES, MODELS, Case
from trouterd.config import Route
from trouterd.worker.device_route import StateUsedError, device_route, impurity
from trouterd.worker.route import WorkerRoute


def sides(route: Route) -> list[WorkerRoute]:
    names = route.models
    cluster = Cluster({name: LookupRunner(MODELS[name]) for name in names}, {"demo": route})
    return [cluster.workers[name].routes["demo"] for name in names]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_built_in_algorithm_is_pure_on_every_side(case: Case) -> None:
    assert [impurity(side) for side in sides(case.route())] == [""] * case.models


USERS = {
    "decides in Python": ("def decide(self, token):\n        return 0", "plain Python"),
    "looks at values": (
        "def route(self, step):\n        return step.tokens if (step.index == 3).any() else step.index",
        "Data",
    ),
    "makes lists": ("def route(self, step):\n        return torch.tensor(step.tokens.tolist())", "Data"),
    "loops over state": (
        "def route(self, step):\n        return torch.tensor([0 for _ in step.state])",
        "StateUsedError",
    ),
    "indexes state": (
        "def route(self, step):\n        return step.index + step.state[0].get('n', 0)",
        "StateUsedError",
    ),
    "counts state": ("def route(self, step):\n        return torch.zeros(len(step.state))", "StateUsedError"),
    "asks whether there is state": (
        "def route(self, step):\n        return step.index if step.state else step.tokens",
        "State",
    ),
    "raises": ("def route(self, step):\n        return step.params['nothing']", "KeyError: 'nothing'"),
    "answers one number": ("def route(self, step):\n        return step.index.sum()", "one destination per row"),
    "answers a list": ("def route(self, step):\n        return [0, 0, 0]", "one destination per row"),
    "says so itself": ("pure = False\n    def route(self, step):\n        return step.index * 0", "plain Python"),
}


@pytest.mark.parametrize(("body", "reason"), USERS.values(), ids=USERS.keys())
def test_promises_that_users_break(body: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "rule.py"
    path.write_text(
        "import torch\nfrom algorithms.base import Algorithm, Definition\n"
        f"class Rule(Algorithm):\n    {body}\nALGORITHM = Definition('rule', lambda side: Rule)\n"
    )
    for side in sides(Route(models=["small", "large"], algorithm=str(path))):
        assert reason in impurity(side)


def rows(count: int, vocab: int, **params: float) -> RoutedRows:
    index = torch.arange(count)
    return RoutedRows(
        logits=torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)),
        hidden=torch.zeros(count, 4),
        tokens=index,
        index=index,
        seed=index,
        choice=index * 0,
        params={name: torch.full((count,), value) for name, value in params.items()},
    )


def test_device_form_answers_as_the_algorithm_does() -> None:
    entry, peer = sides(Route(models=["small", "large"], algorithm="every_n", params={"shape": "visit", "n": 3}))
    given: dict[str, Any] = {"n": 3.0}
    assert device_route(entry).params == ("n",)
    assert device_route(entry).decide(rows(6, 48, **given)).tolist() == [0, 0, 1, 0, 0, 1]
    back = device_route(peer).decide(rows(3, 48, **given))
    assert (back.tolist(), back.dtype) == ([1, 1, 1], torch.int64)


def test_state_is_refused_when_it_is_reached_for_later(tmp_path: Path) -> None:
    """What the probe does not meet, since this code knows rows without values, raises on the device."""
    path = tmp_path / "sly.py"
    path.write_text(
        "from torch._subclasses.fake_tensor import FakeTensor\nfrom algorithms.base import Algorithm, Definition\n"
        "class Sly(Algorithm):\n    def route(self, step):\n"
        "        return step.index * 0 if isinstance(step.index, FakeTensor) else step.state[0]['n'] + step.index\n"
        "ALGORITHM = Definition('sly', lambda side: Sly)\n"
    )
    side = sides(Route(models=["small", "large"], algorithm=str(path)))[0]
    assert impurity(side) == ""
    with pytest.raises(StateUsedError):
        device_route(side).decide(rows(2, 48))
