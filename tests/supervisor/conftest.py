"""Daemons that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.daemon import Daemon, toy_config
from trouterd.config import Config

Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a daemon in this test's folder: of a given configuration, or of toy workers by name."""
    daemons: list[Daemon] = []

    def run(config: Config | None = None, *, options: dict[str, Any] | None = None, **models: str) -> Daemon:
        daemon = Daemon(config or toy_config(tmp_path, **models), tmp_path, **(options or {}))
        daemons.append(daemon)
        return daemon

    yield run
    for daemon in daemons:
        daemon.close()
