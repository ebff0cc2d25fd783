"""Ranks as processes on a CPU: whatever is scheduled, they decide what one process decides, and no failure hangs."""

from __future__ import annotations

import random

import pytest

from models.config import ModelError
from models.device_runner import DeviceRunner
from models.kv_cache import KvCache
from tests.models.hash_rows import PAGE, HashRows
from tests.models.parallel.conftest import Lead
from tests.models.parallel.split_hash import PAGES
from tests.models.schedules import ROUTES, Schedule

SLOTS = 6


@pytest.mark.parametrize(("world", "steps"), [(2, 100), pytest.param(4, 200, marks=pytest.mark.slow)])
def test_any_schedule_decides_as_one_process_does(lead: Lead, world: int, steps: int) -> None:
    leader = lead("hash", world)
    leader.allocate_kv(60)
    assert (leader.weight_bytes, leader.kv_bytes_per_page) == (1000 + world - 1, 8 * PAGE)
    whole = HashRows(num_pages=60, max_pages=PAGES)
    runner = DeviceRunner(leader, max_slots=SLOTS, max_pages=PAGES)
    assert runner.set_routes(ROUTES) == (True, True, True)
    kv = KvCache(60, PAGE, SLOTS, PAGES * PAGE, prefix_cache=False)
    played = Schedule(runner, whole.output_of, kv, random.Random(world))
    played.run(steps)
    assert played.checked > steps
    assert played.dead


def test_pages_that_do_not_fit_are_named(lead: Lead) -> None:
    with pytest.raises(ModelError, match=r"^cpu: not enough memory for 1001 pages of K and V, 0 MiB$"):
        lead("hash", 1).allocate_kv(1001)
