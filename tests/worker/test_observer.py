"""What a worker reports of its steps and hand-offs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from models.batch import ModelRunner
from models.script import ScriptRunner
from tests.harness import Cluster
from tests.worker.resident import FakeResident
from trouterd.batching.report import Step
from trouterd.config import Route
from trouterd.worker.observer import Observer
from trouterd.worker.stats import Stats


@dataclass
class Asked:
    prompt_length: int = 4


@dataclass
class Fed:
    """As much of a chunk as the observer looks at."""

    first: int = 9
    wants_logits: bool = True
    request: Asked = field(default_factory=Asked)


@dataclass
class Decided:
    chunks: list[Any]
    seconds: float
    alive: list[bool] = field(default_factory=list)
    """All of them unless said."""

    def __post_init__(self) -> None:
        self.alive = self.alive or [True] * len(self.chunks)


def ended(observer: Observer, begin: float, now: float, *, seconds: float = 0.5, followed: bool = False) -> None:
    observer.note(Decided([Fed(), Fed()], seconds), begin, now, followed=followed)  # type: ignore[arg-type]


def test_a_step_that_was_alone_lasts_until_the_next_one_can_be_launched() -> None:
    observer = Observer(Stats())
    ended(observer, 1.0, 1.5)
    assert observer.busy_seconds == 0
    observer.ready(1.75)
    observer.ready(2.0)  # nothing has ended since
    report = observer.report(2.0, 3, 0)
    assert [(step.begin, step.seconds, step.requests) for step in report.steps] == [(1.0, 0.75, 2)]
    assert observer.busy_seconds == 0.75
    assert report.decisions == 2


def test_a_step_behind_another_one_took_what_the_device_says() -> None:
    observer = Observer(Stats())
    ended(observer, 0.0, 1.5, seconds=0.25, followed=True)
    ended(observer, 0.0, 1.75, seconds=0.25)
    observer.ready(2.0)
    assert [(step.begin, step.seconds) for step in observer.report(2.0, 3, 0).steps] == [(1.25, 0.25), (1.5, 0.5)]
    assert observer.busy_seconds == 0.75


def test_prompts_are_busy_time_of_no_requests() -> None:
    observer = Observer(Stats())
    observer.note(Decided([Fed(first=0)], 0.5), 1.0, 1.5, followed=False)  # type: ignore[arg-type]
    observer.ready(2.0)
    assert observer.busy_seconds == 1.0
    assert observer.report(2.0, 3, 0).steps == observer.since(0.0) == [Step(1.0, 1.0, 0)]


def test_dead_steps_are_busy_time_of_no_requests() -> None:
    observer = Observer(Stats())
    observer.note(Decided([Fed()], 0.5, [False]), 1.0, 1.5, followed=False)  # type: ignore[arg-type]
    observer.ready(2.0)
    assert observer.busy_seconds == 1.0
    report = observer.report(2.0, 3, 0)
    assert (report.steps, report.decisions) == ([Step(1.0, 1.0, 0)], 0)


def test_requests_of_a_step_are_those_whose_rows_were_alive() -> None:
    """As in all other counts: routing is told by them."""
    observer = Observer(Stats())
    observer.note(Decided([Fed()] * 5, 0.5, [True, False, True, True, False]), 1.0, 1.5, followed=True)  # type: ignore[arg-type]
    report = observer.report(2.0, 3, 0)
    assert [step.requests for step in report.steps] == [3]
    assert report.decisions == 3
    assert observer.since(0.0) == report.steps


PROMPT, PART = Fed(first=0), Fed(first=0, wants_logits=False)


@pytest.mark.parametrize(
    ("chunks", "alive", "counts"),
    [
        ([PROMPT], [True], True),
        ([Fed(), PROMPT], [True, True], True),
        # Of a part that wants no logits nothing is decided.
        ([PART], [], True),
        ([PART, Fed()], [False], True),
        ([Fed(), Fed()], [True, True], False),
        # The last token of a prompt alone is a step like any other.
        ([Fed(first=3)], [True], False),
        # Dead rows feed nothing.
        ([Fed()], [False], False),
        ([PROMPT], [False], False),
        ([PROMPT, Fed()], [False, True], False),
    ],
)
def test_seconds_of_prompts_are_those_of_steps_that_fed_a_part_of_one(
    chunks: list[Any], alive: list[bool], counts: bool
) -> None:
    observer = Observer(Stats())

    def note(begin: float, now: float, *, followed: bool) -> None:
        outcome = Decided(chunks, 0.25)
        outcome.alive = alive
        observer.note(outcome, begin, now, followed=followed)  # type: ignore[arg-type]

    note(0.0, 1.5, followed=True)
    assert observer.report(1.5, 3, 0).prompt_seconds == 0.25 * counts
    # Alone: it lasts until the next one can be launched.
    note(2.0, 2.5, followed=False)
    assert observer.report(2.5, 3, 0).prompt_seconds == 0.25 * counts
    observer.ready(2.75)
    observer.ready(3.0)
    assert observer.report(3.0, 3, 0).prompt_seconds == 1.0 * counts
    assert observer.busy_seconds == 1.0
    ended(observer, 3.0, 3.5)
    observer.ready(3.75)
    assert observer.report(4.0, 3, 0).prompt_seconds == 1.0 * counts, "the next one is another step"


def test_the_latest_steps_stay_for_whoever_measures() -> None:
    observer = Observer(Stats())
    for begin in (1.0, 2.0, 3.0):
        ended(observer, begin, begin + 0.5)
        observer.ready(begin + 0.75)
    observer.report(4.0, 3, 0)
    assert [step.begin for step in observer.since(2.75)] == [3.0]
    assert [step.begin for step in observer.since(2.5)] == [2.0, 3.0]
    assert len(observer.since(0.0)) == 3


def test_a_hand_off_is_timed_from_both_sides() -> None:
    stats = Stats()
    observer = Observer(stats)
    chunks: list[Any] = [Fed()]
    observer.awaited(chunks, 0.9, 1.0)  # nobody had waited before the first step
    ended(observer, 1.0, 1.5)
    stats.handed_at = 1.625
    observer.ready(1.75)
    ended(observer, 2.0, 2.5)
    observer.ready(2.75)  # this step handed nothing over
    observer.awaited(chunks, 2.625, 3.0)  # came before the model was idle
    prompt: list[Any] = [Fed(first=0)]
    observer.awaited(prompt, 2.875, 3.0)
    observer.awaited(chunks, 2.875, 3.0)
    report = observer.report(3.0, 1, 0)
    assert (report.handed, report.handed_seconds) == (1, 0.125)
    assert (report.waited, report.waited_seconds) == (1, 0.125)


def test_what_a_step_with_another_behind_it_hands_over_is_sent_after_its_end() -> None:
    stats = Stats()
    observer = Observer(stats)

    def handed() -> tuple[int, float]:
        report = observer.report(9.0, 1, 0)
        return report.handed, report.handed_seconds

    ended(observer, 0.0, 1.5, followed=True)
    stats.handed_at = 1.625
    observer.ready(1.75)
    assert handed() == (1, -0.125)
    observer.ready(1.875)
    # The row behind it was dead, and handed nothing over.
    observer.note(Decided([Fed()], 0.25, [False]), 0.0, 2.0, followed=False)  # type: ignore[arg-type]
    observer.ready(2.25)
    assert handed() == (1, -0.125)
    # Two outcomes in a row.
    ended(observer, 0.0, 3.0, followed=True)
    stats.handed_at = 3.25
    ended(observer, 0.0, 3.5, followed=True)
    ended(observer, 0.0, 4.0)
    observer.ready(4.25)
    assert handed() == (2, -0.375)


@asynccontextmanager
async def visited(device: Callable[[ScriptRunner], ModelRunner] = lambda runner: runner) -> AsyncIterator[Cluster]:
    """Workers after one answer in which every third token was the large model's."""
    runners = {
        name: device(ScriptRunner([ids], vocab_size=258, eos=257, cycle=True, delay_ms=1.0))
        for name, ids in (("small", 1), ("large", 2))
    }
    route = Route(models=["small", "large"], algorithm="every_n", params={"shape": "visit", "n": 3})
    async with Cluster(runners, {"demo": route}).running() as cluster:
        await cluster.generate("demo", [1, 2, 3], max_tokens=30)
        await cluster.settled()
        yield cluster


async def test_every_launch_of_a_request_has_a_wait() -> None:
    async with visited() as cluster:
        small, large = (cluster.workers[name].stats for name in ("small", "large"))
        for stats, arrived in ((small, 1), (large, 0)):
            assert sum(stats.arrival_seconds.counts) == arrived
            assert sum(stats.handoff_seconds.counts) == len(stats.recent_handoffs) > 5
            waited = arrived + len(stats.recent_handoffs) + sum(stats.stay_seconds.counts)
            assert waited == stats.batch_requests.sum
        assert sum(large.stay_seconds.counts) == 0
        assert small.stay_seconds.sum > 0


async def test_hand_offs_are_timed_although_rows_that_leave_have_dead_ones_behind_them() -> None:
    def device(runner: ScriptRunner) -> FakeResident:
        made = FakeResident(runner)
        made.skipped = 8
        return made

    async with visited(device) as cluster:
        dead = 0
        for worker in cluster.workers.values():
            sent = worker.stats.handoffs.total()
            assert sent - 1 <= worker.observer.handed <= sent
            dead += worker.stats.steps - int(worker.stats.batch_requests.sum)
        assert dead > 10, "most steps that hand over have another one behind them"


async def test_workers_time_hand_offs_that_are_waited_for() -> None:
    """One request: every hand-off finds its receiver idle, every step that hands over has none behind it."""
    async with visited() as cluster:
        for worker in cluster.workers.values():
            observer, sent, received = worker.observer, worker.stats.handoffs.total(), len(worker.stats.recent_handoffs)
            assert min(sent, received) > 5
            # The first visit feeds a prompt.
            assert received - 2 <= observer.waited <= received
            assert sent - 1 <= observer.handed <= sent
            # Both workers share one event loop here: the receiver may launch before the sender is ready again.
            assert observer.handed_seconds > 0
            assert observer.waited_seconds > 0
            assert observer.busy_seconds >= worker.stats.steps * 1e-3
            assert 1e-3 <= observer.prompt_seconds < observer.busy_seconds
