"""The controller's place in the api: what a restarted one takes up."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from trouterd.api.batching import Batching
from trouterd.batching import state
from trouterd.batching.controller import Kept
from trouterd.batching.groups import fingerprint
from trouterd.child import Control
from trouterd.config import Config, Model, Route, Server


@dataclass
class Booted:
    """As much of the control link as it needs to begin."""

    config: Config
    handlers: dict[str, Any] = field(default_factory=dict)


def test_a_freeze_goes_on_in_the_next_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    config = Config(
        server=Server(control=str(tmp_path / "trouterd.ctl")),
        models={"small": Model(path="s"), "large": Model(path="l")},
        routes={"demo": Route(models=["small", "large"])},
    )
    path = state.path_of(config, os.environ)
    assert path is not None
    state.save(path, fingerprint(config), {"small": Kept(frozen=1000.0, freeze=2000.0)})
    (controller,) = Batching(cast("Control", Booted(config))).controllers
    kept = controller.keep(time.monotonic())
    assert 0 < kept.frozen <= 1000.0
    assert kept.freeze == 2000.0
