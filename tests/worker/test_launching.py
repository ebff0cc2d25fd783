"""Delayed batching in workers: nobody is stranded, and what is written does not depend on who waits for whom."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.script import ScriptRunner
from tests.harness import Cluster
from trouterd.batching.launch import Reason
from trouterd.config import Route
from trouterd.worker.active import ActiveCounts
from trouterd.worker.launching import Launching
from trouterd.worker.scheduler import Chunk, Scheduler
from trouterd.worker.stats import Stats
from trouterd.worker.stepper import NEVER

SMALL = [10 + i for i in range(64)]
LARGE = [110 + i for i in range(64)]
CLOCK = 1e-9
"""Seconds that rounding may add to a virtual time."""


# The rule alone, in virtual time


@dataclass(eq=False)
class Item:
    """What the rule sees of a request."""

    rid: int
    ready: float = 0.0
    due: int = 1
    chained: bool = False
    fed: int = 0
    prompt_length: int = 1
    handoff_sent_ns: int = 0
    left: int = 20
    route: Any = field(default_factory=lambda: SimpleNamespace(stay_rate=0.5))
    leaves: bool = False

    @property
    def uncertain(self) -> bool:
        return self.chained


class Model:
    """A worker without a model: an idle one asks the rule; a step takes its time."""

    def __init__(self, thresholds: list[int], linger: float) -> None:
        self.running: list[Item] = []
        self.view = SimpleNamespace(running=self.running, waiting=deque(), cold=False, short_of_room=False)
        self.active = SimpleNamespace(total=0)
        self.rule = Launching(cast(Scheduler, self.view), cast(ActiveCounts, self.active))
        self.rule.configure(thresholds, linger, relax=False)
        self.batch: list[Item] = []
        self.idle_since = 0.0
        self.look = 0.0
        """When the rule has to be asked again, as far as that is noted."""


class World:
    """Requests that move between models by chance; `news` is how late the models hear of ends, seconds at most."""

    def __init__(self, dice: random.Random, models: list[Model], requests: int, news: float) -> None:
        self.dice, self.models, self.news, self.left = dice, models, news, requests
        self.now = 1.0
        self.longest = 0.0
        """For which an idle model let a ready request wait."""
        self.sizes: list[int] = []
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        for model in models:
            model.active.total = requests
        for rid in range(requests):
            self._later(dice.random() * 0.01, self._arrive, dice.choice(models), Item(rid, left=dice.randint(1, 30)))

    def run(self) -> None:
        """To the ends of all requests."""
        while self._queue:
            self.now, _, event = heapq.heappop(self._queue)
            event()
            for model in self.models:
                if model.running and not model.batch:
                    self._ask(model)
        assert self.left == 0

    def _later(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), partial(event, *args)))

    def _arrive(self, model: Model, item: Item) -> None:
        item.ready, item.handoff_sent_ns = self.now, int(self.now * 1e9)
        model.running.append(item)

    def _end(self, model: Model) -> None:
        batch, model.batch, model.idle_since = model.batch, [], self.now
        for item in batch:
            item.left -= 1
            if item.left == 0:
                self.left -= 1
                for other in self.models:
                    self._later(self.dice.random() * self.news, self._hear, other)
            elif self.dice.random() < 0.5:
                item.ready, item.handoff_sent_ns = self.now, 0
                model.running.append(item)
            else:
                self._later(self.dice.random() * 0.002, self._arrive, self.dice.choice(self.models), item)

    def _hear(self, model: Model) -> None:
        model.active.total -= 1

    def _ask(self, model: Model) -> None:
        due = model.rule.due(self.now, in_flight=False)
        if due > self.now:
            assert due < NEVER
            if model.look != due:
                model.look = due
                heapq.heappush(self._queue, (due, next(self._numbers), lambda: None))
            return
        self.longest = max(self.longest, self.now - max(model.idle_since, min(item.ready for item in model.running)))
        model.batch = list(model.running)
        model.running.clear()
        self.sizes.append(len(model.batch))
        model.rule.launched(chunks(model.batch), self.now)
        for item in model.batch:
            item.handoff_sent_ns = 0
        self._later(self.dice.uniform(0.001, 0.03), self._end, model)


def chunks(items: list[Item]) -> list[Chunk]:
    return cast(list[Chunk], [SimpleNamespace(request=item) for item in items])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    requests=st.integers(1, 12),
    lists=st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=12), min_size=1, max_size=3),
    linger=st.floats(0, 0.1),
    news=st.floats(0, 0.5),
)
def test_nobody_is_stranded_and_no_wait_is_longer_than_the_linger_time(
    seed: int, requests: int, lists: list[list[int]], linger: float, news: float
) -> None:
    """Whatever the lists, feasible or not, and however late the counts."""
    world = World(random.Random(seed), [Model(thresholds, linger) for thresholds in lists], requests, news)
    world.run()
    assert world.longest <= linger + CLOCK
    assert all(1 <= size <= requests for size in world.sizes)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 16), requests=st.integers(1, 12), ones=st.integers(1, 12))
def test_a_list_of_ones_is_no_list(seed: int, requests: int, ones: int) -> None:
    models = [Model([1] * ones, 0.05) for _ in range(2)]
    world = World(random.Random(seed), models, requests, 0.0)
    world.run()
    assert world.longest == 0.0
    assert all(not model.rule.thresholds and not model.rule.reasons for model in models)
    eager = World(random.Random(seed), [Model([], 0.0) for _ in range(2)], requests, 0.0)
    eager.run()
    assert eager.sizes == world.sizes


@given(active=st.integers(0, 40), thresholds=st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_one_active_request_never_waits(active: int, thresholds: list[int]) -> None:
    model = Model(thresholds, 0.05)
    model.active.total = active
    assert 1 <= model.rule.threshold <= max(active, 1)
    model.active.total = 1
    model.running.append(Item(1))
    assert model.rule.due(5.0, in_flight=False) == 0.0


def test_prompts_are_not_held_back() -> None:
    model = Model([1, 2, 3, 4], 0.05)
    model.active.total = 4
    model.running.append(Item(1))
    assert model.rule.due(5.0, in_flight=False) == pytest.approx(5.05)
    model.running.append(Item(2, fed=16, prompt_length=40))
    assert model.rule.due(5.01, in_flight=False) == 0.0
    model.rule.launched(chunks(model.running), 5.01)
    assert model.rule.reasons == {Reason.PREFILL: 1}
    assert model.rule.holds.sum == pytest.approx(0.01)
    model.running[1].fed = 40
    model.view.cold = True
    assert model.rule.due(5.02, in_flight=False) == 0.0


@pytest.mark.parametrize("active", [0, 3])
def test_who_is_held_back_and_goes_away_is_not_counted_on(active: int) -> None:
    """The next request's hold begins with itself, whether others of the route are still active elsewhere or none is."""
    model = Model([1, 2], 10.0)
    model.active.total = 3
    model.running.append(Item(0))
    assert model.rule.due(1.0, in_flight=False) > 1.0
    model.running.clear()
    model.active.total = active
    assert model.rule.due(2.0, in_flight=False) == 0.0
    assert not model.rule.holding
    model.active.total = 3
    model.running.append(Item(1))
    assert model.rule.due(100.0, in_flight=False) > 100.0
    model.running.append(Item(2))
    assert model.rule.due(100.5, in_flight=False) == 0.0
    model.rule.launched([], 100.5)
    assert model.rule.holds.sum == pytest.approx(0.5)


def test_requests_without_room_do_not_count() -> None:
    model = Model([1, 2], 0.05)
    model.active.total = 2
    model.view.waiting.append(Item(2, due=1))
    model.running.append(Item(1))
    assert model.rule.due(5.0, in_flight=False) == 0.0
    model.view.short_of_room = True
    assert model.rule.due(5.0, in_flight=False) == pytest.approx(5.05)


def test_behind_a_step_in_flight_its_own_requests_count_as_the_share_that_stays() -> None:
    model = Model([1, 1, 2, 2, 2], 0.05)
    model.active.total = 5
    model.running += [Item(rid, chained=True) for rid in range(3)]
    assert model.rule.due(5.0, in_flight=True) == NEVER
    model.running.append(Item(3, chained=True))
    assert model.rule.due(5.0, in_flight=True) == 0.0
    del model.running[1:]
    model.running.append(Item(4))
    assert model.rule.due(5.0, in_flight=True) == pytest.approx(5.05)
    assert model.rule.due(5.01, in_flight=False) == 0.0  # the step has ended, and its request stays


def test_who_most_likely_leaves_is_not_counted_on() -> None:
    model = Model([1, 2, 3], 0.05)
    model.active.total = 3
    model.running += [Item(rid, chained=True, leaves=True) for rid in range(30)]
    model.running.append(Item(31))
    assert model.rule.due(5.0, in_flight=True) == pytest.approx(5.05)
    for item in model.running[:30]:
        item.leaves = False
    assert model.rule.due(5.0, in_flight=True) == 0.0


def test_who_found_no_room_goes_on_waiting_whoever_else_was_launched() -> None:
    model = Model([1, 1, 2, 2], 0.05)
    model.active.total = 4
    left, *others = [Item(0), *[Item(rid, chained=True) for rid in range(1, 4)]]
    model.running += [left, *others]
    assert model.rule.due(5.0, in_flight=True) == 0.0
    model.rule.launched(chunks(others), 5.0)
    model.running[:] = [left]
    assert model.rule.due(5.02, in_flight=True) == pytest.approx(5.05)
    model.rule.launched(chunks([left]), 5.05)
    assert model.rule.due(5.06, in_flight=True) == pytest.approx(5.11)


def test_relaxed_a_member_of_the_last_batch_is_enough() -> None:
    model = Model([1, 2, 3], 0.05)
    model.rule.configure([1, 2, 3], 0.05, relax=True)
    model.active.total = 3
    model.running += [Item(rid) for rid in range(3)]
    assert model.rule.due(5.0, in_flight=False) == 0.0
    model.rule.launched(chunks(model.running), 5.0)
    model.running[:] = [Item(7)]
    assert model.rule.due(5.02, in_flight=False) == pytest.approx(5.07)
    model.running.append(Item(2))
    assert model.rule.due(5.03, in_flight=False) == 0.0


def test_a_hand_off_without_a_step_is_no_run() -> None:
    """Of a request whose first token another model writes."""
    stats = Stats()
    stats.handoff(0, 1, 0, 0, 5)
    stats.handoff(0, 1, 3, 3, 7)
    assert (stats.handoffs[0, 1], dict(stats.runs)) == (2, {3: 1})


# Whole workers


def pair(p: float = 0.35) -> Cluster:
    runners = {name: ScriptRunner(ids, vocab_size=258, eos=257) for name, ids in (("small", SMALL), ("large", LARGE))}
    return Cluster(runners, {"demo": Route(models=["small", "large"], algorithm="bernoulli", params={"p": p})})


def configure(cluster: Cluster, small: list[int], large: list[int], linger: float) -> None:
    for name, thresholds in (("small", small), ("large", large)):
        cluster.workers[name].launching.configure(thresholds, linger, relax=False)


async def answers(cluster: Cluster, count: int, tokens: int = 24) -> list[tuple[list[int], list[int]]]:
    jobs = [cluster.generate("demo", [1, 2, 3], max_tokens=tokens, seed=seed) for seed in range(count)]
    return [(answer.tokens, answer.writers) for answer in await asyncio.gather(*jobs)]


@pytest.mark.parametrize("device", ["host", "depth 2", "depth 2, late"], indirect=True)
@pytest.mark.parametrize(("small", "large"), [(1, 4), (3, 3), (1, 6), (6, 6)])
async def test_thresholds_change_batches_but_no_token(device: str, small: int, large: int) -> None:
    async with pair().running() as cluster:
        expected = await answers(cluster, 6)
        configure(cluster, [1, *[small] * 5], [1, *[large] * 5], linger=0.005)
        assert await answers(cluster, 6) == expected
        rule = cluster.workers["large"].launching
        assert rule.reasons[Reason.THRESHOLD] + rule.reasons[Reason.LINGER] > 0
        await cluster.settled()


async def test_a_lone_request_waits_for_nobody() -> None:
    async with pair().running() as cluster:
        configure(cluster, [1, 2, 3], [1, 2, 3], linger=60.0)
        await answers(cluster, 1)
        assert not cluster.workers["large"].launching.reasons
        await cluster.settled()


async def test_thresholds_that_can_deadlock_cost_lingers_and_nothing_else() -> None:
    """Both models wait for both requests, which are hardly ever at the same one."""
    async with pair().running() as cluster:
        expected = await answers(cluster, 2)
        configure(cluster, [1, 2], [1, 2], linger=0.002)
        assert await answers(cluster, 2) == expected
        assert sum(worker.launching.reasons[Reason.LINGER] for worker in cluster.workers.values()) > 0
        await cluster.settled()


async def test_visitors_that_are_held_back_are_not_refused() -> None:
    async with pair(p=1.0).running() as cluster:
        configure(cluster, [1], [1, 3, 3], linger=0.01)
        assert [tokens for tokens, _ in await answers(cluster, 2)] == [LARGE[:24]] * 2
        assert cluster.workers["large"].stats.refusals == 0
        assert cluster.workers["small"].stats.fallbacks == 0
        await cluster.settled()


async def test_an_end_lowers_the_threshold_at_once() -> None:
    async with pair(p=1.0).running() as cluster:
        configure(cluster, [1], [1, 2], linger=60.0)
        rid, _ = cluster.submit("large", [9] * 3, max_tokens=60)
        _, other = cluster.submit("demo", [1, 2, 3], max_tokens=60)
        await other.until(3)
        cluster.abort(rid, "large")
        await other.done.wait()
        assert other.tokens == LARGE[:60]
        await cluster.settled()
