"""The controller's place in the api: what a restarted one takes up."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trouterd.api import batching as module
from trouterd.api.batching import Batching
from trouterd.batching import state
from trouterd.batching.controller import Controller, Kept
from trouterd.batching.groups import fingerprint
from trouterd.child import Control
from trouterd.config import Config, Model, Route, Server


@dataclass
class Booted:
    """As much of the control link as it needs."""

    config: Config
    handlers: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    async def call(self, verb: str, _args: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(verb)
        return {}


def routed(folder: Path) -> Config:
    return Config(
        server=Server(control=str(folder / "trouterd.ctl")),
        models={"small": Model(path="s"), "large": Model(path="l")},
        routes={"demo": Route(models=["small", "large"])},
    )


def test_a_freeze_goes_on_in_the_next_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    config = routed(tmp_path)
    path = state.path_of(config, os.environ)
    assert path is not None
    state.save(path, fingerprint(config), {"small": Kept(frozen=1000.0, freeze=2000.0)})
    (controller,) = Batching(cast("Control", Booted(config))).controllers
    kept = controller.keep(time.monotonic())
    assert 0 < kept.frozen <= 1000.0
    assert kept.freeze == 2000.0


class Scripted:
    """A controller that changes what it is told to."""

    group = SimpleNamespace(models=("small", "large"))
    network = object()

    def __init__(self) -> None:
        self.lists: dict[str, list[int]] = {}
        self.lingers: dict[str, float] = {}
        self.settled: tuple[dict[str, list[int]], float] = ({}, 60.0)
        self.turns = False
        self.changed = False

    def observe(self, _reports: object) -> None:
        pass

    def recompute(self, _now: float, *, obeyed: bool) -> bool:
        assert obeyed
        return self.changed

    def keep(self, _now: float) -> Kept:
        return Kept(lists=self.settled[0], freeze=self.settled[1])


async def test_verdicts_are_written_at_once_and_trials_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setattr(module, "RECOMPUTE", 0.0)
    saved: list[Kept] = []
    monkeypatch.setattr(module.state, "save", lambda _path, _print, groups: saved.append(groups["small"]))
    control, controller = Booted(routed(tmp_path)), Scripted()
    batching = Batching(cast("Control", control))
    batching.controllers = [cast("Controller", controller)]
    decisions = iter(range(1, 99))

    async def reports() -> dict[str, Any]:
        return {"small": SimpleNamespace(decisions=next(decisions), version=batching._version)}

    monkeypatch.setattr(batching, "_reports", reports)
    # A trial begins: workers go by other lists, which nobody keeps.
    controller.lists, controller.changed = {"large": [2]}, True
    await batching._turn()
    assert (control.calls, saved) == (["batching-lists"], [])
    # It wins: workers go on as they do.
    controller.changed, controller.settled = False, ({"large": [2]}, 60.0)
    await batching._turn()
    assert control.calls == ["batching-lists"]
    assert [kept.lists for kept in saved] == [{"large": [2]}]
    await batching._turn()
    assert len(saved) == 1
    # A change is taken back.
    controller.settled = ({"large": [2]}, 120.0)
    await batching._turn()
    assert saved[-1].freeze == 120.0
