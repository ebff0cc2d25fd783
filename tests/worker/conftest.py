"""Tests of whole workers run on every kind of device: one whose steps the host waits for, and ones with steps in flight."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from models.batch import ModelRunner
from models.device_runner import DeviceRunner
from models.torch_rows import TorchRows
from models.torch_runner import TorchRunner
from tests.harness import Cluster
from tests.worker.lookup import LookupRunner
from tests.worker.lookup_rows import device_runner
from tests.worker.resident import MOST_SLOTS, FakeResident

QUICK = ("test_cluster", "test_races")
"""Modules that run on all devices every time."""
LOOKUP = ("test_drafting", "test_me", "test_oracle", "test_oracle_transformers", "test_storms")
"""Modules whose models answer by the ids in front."""
LONG = ("test_faults", "test_drafting_faults", "test_query", *LOOKUP)
"""Modules that run on two devices, and on the others when there is time."""


def host(runner: ModelRunner) -> ModelRunner:
    return runner


def fake(depth: int, patience: int = 0, *, eager: bool = False) -> Callable[[ModelRunner], ModelRunner]:
    def build(runner: ModelRunner) -> ModelRunner:
        # A step that fails does so at its launch.
        fails = getattr(runner, "fail_at", None) is not None
        return FakeResident(runner, depth, dice=random.Random(depth), patience=patience, eager=eager or fails)

    return build


def real(depth: int) -> Callable[[ModelRunner], ModelRunner]:
    """The device runner itself, in the form that it has on a CPU."""

    def build(runner: ModelRunner) -> ModelRunner:
        if isinstance(runner, TorchRunner):
            pages = -(-runner.context_length // runner.page_size)
            return DeviceRunner(TorchRows(runner), max_slots=MOST_SLOTS, max_pages=pages, depth=depth)
        return device_runner(runner, depth) if isinstance(runner, LookupRunner) else runner

    return build


DEVICES = {
    "host": host,
    "depth 1": fake(1, eager=True),
    "depth 2": fake(2, eager=True),
    "depth 2, late": fake(2, patience=5),
    "depth 3, late": fake(3, patience=9),
    "runner, depth 1": real(1),
    "runner, depth 2": real(2),
}
ALWAYS = ("host", "depth 2, late")
COSTLY = (
    "test_against_full_recomputation",
    "test_architectures_that_transformers_code_runs",
    "test_copies_of_one_model_write_what_it_writes_alone",
    "test_the_cases_reach_what_they_are_for",
)
"""Tests that run on the host alone, and on devices when there is time."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in (*QUICK, *LONG):
        # Scripts answer by output index, which a row decoder does not know.
        kinds = [name for name in DEVICES if module in LOOKUP or not name.startswith("runner")]
        always = DEVICES if module in QUICK else ALWAYS[:1] if metafunc.function.__name__ in COSTLY else ALWAYS
        seldom = [name for name in DEVICES if name not in always]
        names = [pytest.param(name, marks=pytest.mark.slow if name in seldom else ()) for name in kinds]
        metafunc.parametrize("device", names, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the kind of device that the workers of this test run on."""
    name = getattr(request, "param", "host")
    monkeypatch.setattr(Cluster, "device", staticmethod(DEVICES[name]))
    return name
