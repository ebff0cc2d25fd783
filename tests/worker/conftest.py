"""Tests of whole workers run on every kind of device: one whose steps the host waits for, and ones with steps in flight."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from models.batch import ModelRunner
from tests.harness import Cluster
from tests.worker.resident import FakeResident

MODULES = ("test_cluster", "test_faults", "test_oracle", "test_races", "test_storms")


def host(runner: ModelRunner) -> ModelRunner:
    return runner


def fake(depth: int, patience: int = 0, *, eager: bool = False) -> Callable[[ModelRunner], ModelRunner]:
    def build(runner: ModelRunner) -> ModelRunner:
        # A step that fails does so at its launch.
        fails = getattr(runner, "fail_at", None) is not None
        return FakeResident(runner, depth, dice=random.Random(depth), patience=patience, eager=eager or fails)

    return build


DEVICES = {
    "host": host,
    "depth 1": fake(1, eager=True),
    "depth 2": fake(2, eager=True),
    "depth 2, late": fake(2, patience=5),
    "depth 3, late": fake(3, patience=9),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in MODULES and "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the kind of device that the workers of this test run on."""
    name = getattr(request, "param", "host")
    monkeypatch.setattr(Cluster, "device", staticmethod(DEVICES[name]))
    return name
