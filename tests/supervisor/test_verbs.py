"""Live changes beside children that start, end and refuse meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.supervisor.daemon import toy_config
from trouterd.calls import CallError, Refused
from trouterd.config import Config
from trouterd.supervisor.fleet import API, Fleet
from trouterd.supervisor.verbs import Verbs

KEY = "server.max_active_requests"
Answer = Callable[[Any], None]


class Child:
    """Notes what it is asked; `answer` gets the value, and may raise."""

    def __init__(self, name: str, answer: Answer = lambda _: None, state: str = "up") -> None:
        self.name, self.state, self.ready_at = name, state, 1.0
        self.answer = answer
        self.values: list[Any] = []

    async def call(self, verb: str, args: dict[str, Any], _within: float) -> None:
        assert verb == "set"
        assert args["config"]["server"]["max_active_requests"] == args["value"]
        self.values.append(args["value"])
        self.answer(args["value"])


def fleet_of(config: Config, small: Child, large: Child, api: Child) -> Fleet:
    children = {"small": small, "large": large, API: api}
    workers = {name: child for name, child in children.items() if name != API}
    return cast("Fleet", SimpleNamespace(config=config, workers=workers, children=children))


def verbs(fleet: Fleet) -> Verbs:
    return Verbs(fleet, list, lambda _: None)


async def test_a_child_that_starts_while_another_one_is_asked_begins_with_the_new_value(tmp_path: Path) -> None:
    begins: list[int] = []
    small = Child("small", state="down")
    large = Child("large", lambda _: begins.append(fleet.config.server.max_active_requests))
    fleet = fleet_of(toy_config(tmp_path), small, large, Child(API))
    await verbs(fleet).set_key(KEY, 7, "somebody")
    assert begins == [7]
    assert small.values == []


async def test_a_refusal_is_undone_wherever_the_new_value_may_be(tmp_path: Path) -> None:
    """Small was down when it was its turn, and has been started with the new value since; large does not answer any more."""
    small = Child("small", state="down")

    def stall(_value: Any) -> None:
        small.state = "starting"
        raise CallError("large did not answer")

    def refuse(value: Any) -> None:
        if value == 7:
            raise Refused("not that many")

    large, api = Child("large", stall), Child(API, refuse)
    config = toy_config(tmp_path)
    old = config.server.max_active_requests
    fleet = fleet_of(config, small, large, api)
    with pytest.raises(Refused, match=f"{KEY}: not that many"):
        await verbs(fleet).set_key(KEY, 7, "somebody")
    assert fleet.config is config
    assert (small.values, large.values, api.values) == ([old], [7, old], [7, old])
