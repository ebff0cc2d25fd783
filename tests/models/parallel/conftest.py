"""Ranks as real processes on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from models.parallel.leader import LeadingDecoder
from tests.models.parallel import split_hash
from tests.models.parallel.leading_process import Leading
from tests.models.parallel.split_hash import load, model
from trouterd.worker.rank_processes import RankProcesses

Start = Callable[[int], RankProcesses]
Lead = Callable[[str, int], LeadingDecoder]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks whose end is waited for; losing one of them ends the test."""
    started: list[RankProcesses] = []

    def begin(world: int) -> RankProcesses:
        started.append(
            RankProcesses(
                "large",
                world,
                log_level="info",
                log_format="text",
                on_loss=pytest.fail,
                module=split_hash.__name__,
            )
        )
        return started[-1]

    yield begin
    for processes in started:
        processes.close()


@pytest.fixture
def lead(start: Start) -> Iterator[Lead]:
    """Starts ranks and loads a kind of model on them."""
    leaders: list[LeadingDecoder] = []

    def begin(kind: str, world: int) -> LeadingDecoder:
        leaders.append(LeadingDecoder(model(kind, world), start(world).ranks, load))
        return leaders[-1]

    yield begin
    for leader in leaders:
        leader.close()


@pytest.fixture
def begin() -> Iterator[Callable[..., Leading]]:
    """Starts processes with ranks, which are killed at the end."""
    started: list[Leading] = []

    def start(kind: str, world: int, device: str = "cpu") -> Leading:
        started.append(Leading(kind, world, device))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
