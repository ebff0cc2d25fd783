"""The scheduler over a real KV cache, alone: random arrivals, visits, ends and budgets in pools that are far too small."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ipc.messages import Sampling, Submit, pack_ids
from models.kv_cache import KvCache
from models.script import ScriptRunner
from tests.harness import Cluster
from trouterd.config import Route
from trouterd.worker.request import NO_SLOT, Request, State
from trouterd.worker.route import WorkerRoute
from trouterd.worker.scheduler import Chunk, Scheduler

PAGE_SIZE = 3
CONTEXT = 24


def routes() -> dict[str, WorkerRoute]:
    """A route as its entry sees it, and as its peer does."""
    runners = {name: ScriptRunner([1], vocab_size=8) for name in ("small", "large")}
    cluster = Cluster(runners, {"demo": Route(models=["small", "large"])})
    return {"entry": cluster.workers["small"].routes["demo"], "visitor": cluster.workers["large"].routes["demo"]}


ROUTES = routes()


def request(rid: int, prompt: list[int], kind: str = "entry") -> Request:
    submit = Submit(rid, "demo", pack_ids(prompt), Sampling(seed=0, max_tokens=CONTEXT - len(prompt)))
    return Request.open(submit, ROUTES[kind], 0, 0)


def commit(scheduler: Scheduler, chunks: list[Chunk], token: int = 1) -> list[Request]:
    """What a step does to the requests; those that got a token."""
    written = []
    for chunk in chunks:
        chunk.request.fed += chunk.count
        scheduler.kv.commit(chunk.request.slot, chunk.request.tokens, chunk.request.fed)
        if chunk.wants_logits:
            chunk.request.append(token, 0)
            written.append(chunk.request)
    return written


def run_until_written(scheduler: Scheduler, wanted: Request, steps: int) -> int:
    """Steps until a request has got a token."""
    for step in range(steps):
        if wanted in commit(scheduler, scheduler.plan()):
            return step + 1
    pytest.fail(f"no token in {steps} steps")


def test_extends_are_served_under_more_decode_rows_than_a_step_takes() -> None:
    scheduler = Scheduler(KvCache(800, PAGE_SIZE, 64, 200, prefix_cache=False), 64)
    for rid in range(20):
        scheduler.add(request(rid, [1]))
    visitor = request(99, [1, 2, 3], "visitor")
    scheduler.add(visitor)
    run_until_written(scheduler, visitor, 1)
    scheduler.pend(visitor)
    # A live setting.
    scheduler.max_batch_tokens = 16
    for _ in range(10):
        visitor.tokens += [1, 2]
        scheduler.add(visitor)
        run_until_written(scheduler, visitor, 4)
        scheduler.pend(visitor)


def test_all_get_their_turn_in_a_budget_that_is_too_small() -> None:
    scheduler = Scheduler(KvCache(800, PAGE_SIZE, 64, 200, prefix_cache=False), 64)
    crowd = [request(rid, [1]) for rid in range(50)]
    for one in crowd:
        scheduler.add(one)
    commit(scheduler, scheduler.plan())
    # A live setting.
    scheduler.max_batch_tokens = 16
    before = [len(one.tokens) for one in crowd]
    for _ in range(40):
        commit(scheduler, scheduler.plan())
    gained = [len(one.tokens) - was for one, was in zip(crowd, before, strict=True)]
    assert min(gained) >= 40 * 16 // 50 - 1


def test_waiting_request_is_not_overtaken_by_warm_visitors() -> None:
    """Visitors whose prompts are prefilled while somebody waits would run without waiting, one after the other."""
    scheduler = Scheduler(KvCache(8, PAGE_SIZE, 16, CONTEXT, prefix_cache=False), 64)
    first = request(1, [1] * 3, "visitor")
    scheduler.add(first)
    commit(scheduler, scheduler.plan())
    large = request(2, [1] * 20)
    scheduler.add(large)
    here = [first]
    for rid in range(3, 40):
        fresh = request(rid, [1] * 6, "visitor")
        fresh.warm = True
        scheduler.pend(fresh)
        written = commit(scheduler, scheduler.plan())
        if large in written:
            return
        scheduler.add(fresh)
        here.append(fresh)
        if here[0] in written:
            scheduler.pend(here.pop(0))
    pytest.fail("the waiting request was overtaken for ever")


def test_visitor_with_a_fed_prompt_leaves_nothing_to_do_behind() -> None:
    """Or its worker would ask for a turn that it does not use, and nothing of the others could be queued ahead meanwhile."""
    scheduler = Scheduler(KvCache(8, PAGE_SIZE, 16, CONTEXT, prefix_cache=False), 64)
    visitor = request(1, [1] * 6, "visitor")
    visitor.warm = True
    scheduler.pend(visitor)
    assert scheduler.wanted
    commit(scheduler, scheduler.plan())
    scheduler.add(visitor)
    run_until_written(scheduler, visitor, 1)
    scheduler.pend(visitor)
    assert not scheduler.wanted


def test_room_that_has_come_free_is_looked_at_again() -> None:
    """By a visitor whose prompt is still to be fed, although nothing else wants a step."""
    scheduler = Scheduler(KvCache(8, PAGE_SIZE, 16, CONTEXT, prefix_cache=False), 64)
    large = request(1, [1] * 20)
    scheduler.add(large)
    commit(scheduler, scheduler.plan())
    scheduler.pend(large)
    visitor = request(2, [1] * 12, "visitor")
    visitor.warm = True
    scheduler.pend(visitor)
    commit(scheduler, scheduler.plan())
    assert scheduler.short_of_room
    assert not scheduler.wanted
    scheduler.remove(large)
    assert scheduler.wanted
    commit(scheduler, scheduler.plan())
    assert visitor.fed == 11


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go away, return with news, and end; every plan keeps the pool's and the queue's promises."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, Request] = {}
        self.stored: dict[tuple[int, int], int] = {}
        """(page, offset) -> id, as a model would have written it."""
        self.rids = 0
        self.scheduler = Scheduler(KvCache(CONTEXT // PAGE_SIZE, PAGE_SIZE, 4, CONTEXT, prefix_cache=True), 7)

    def setup(self, pages: int, slots: int, budget: int, prefix_cache: bool) -> None:
        self.scheduler = Scheduler(KvCache(pages, PAGE_SIZE, slots, CONTEXT, prefix_cache), budget)

    @precondition(lambda self: not self.rids)
    @rule(
        pages=st.integers(CONTEXT // PAGE_SIZE, 16),
        slots=st.integers(1, 6),
        budget=st.integers(1, 12),
        prefix_cache=st.booleans(),
    )
    def shape(self, pages: int, slots: int, budget: int, prefix_cache: bool) -> None:
        self.setup(pages, slots, budget, prefix_cache)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT - 2))
    def submit(self, prompt: list[int]) -> None:
        self._open(prompt, "entry")

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT - 2), warm=st.booleans(), here=st.booleans())
    def visit(self, prompt: list[int], warm: bool, here: bool) -> None:
        self._open(prompt, "visitor", warm=warm, here=here)

    def _open(self, prompt: list[int], kind: str, *, warm: bool = False, here: bool = True) -> None:
        self.rids += 1
        one = self.requests[self.rids] = request(self.rids, prompt, kind)
        one.warm = warm
        self.scheduler.add(one) if here else self.scheduler.pend(one)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if here := [r for r in self.requests.values() if r.state is not State.PENDING]:
            one = data.draw(st.sampled_from(here))
            # An entry hands on only what it has sampled from.
            if not one.is_entry or one.state is State.RUNNING:
                self.scheduler.pend(one)

    @rule(data=st.data(), cut=st.integers(0, 6), news=st.lists(st.integers(0, 1), max_size=5))
    def come_back(self, data: st.DataObject, cut: int, news: list[int]) -> None:
        if away := [r for r in self.requests.values() if r.state is State.PENDING]:
            one = data.draw(st.sampled_from(away))
            if cut and not one.is_entry and one.output_length:
                one.cut(max(0, one.output_length - cut))
                self.scheduler.truncate(one)
            for token in news[: CONTEXT - 1 - len(one.tokens)]:
                one.append(token, 0)
            self.scheduler.add(one)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.requests:
            self._end(data.draw(st.sampled_from(list(self.requests.values()))))

    def _end(self, one: Request) -> None:
        del self.requests[one.rid]
        self.scheduler.remove(one)

    @rule(steps=st.integers(1, 6), token=st.integers(0, 1))
    def decode(self, steps: int, token: int) -> None:
        for _ in range(steps):
            self._step(token)

    def _step(self, token: int) -> list[Chunk]:
        pinned = {r.rid: (r.slot, r.fed) for r in self.requests.values() if r.is_entry and r.state is State.PENDING}
        chunks = self.scheduler.plan()
        assert pinned == {rid: (self.requests[rid].slot, self.requests[rid].fed) for rid in pinned}
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.max_batch_tokens
        assert len({chunk.request.rid for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            one = chunk.request
            assert chunk.count >= 1
            assert chunk.wants_logits == (chunk.count == one.unfed and one.state is State.RUNNING)
            for position in range(one.fed, one.fed + chunk.count):
                self.stored[self._place(one, position)] = one.tokens[position]
        for one in commit(self.scheduler, chunks, token):
            if len(one.tokens) >= CONTEXT:
                self._end(one)
        return chunks

    def _place(self, one: Request, position: int) -> tuple[int, int]:
        page = int(self.scheduler.kv.page_table[one.slot, position // PAGE_SIZE])
        return page, position % PAGE_SIZE

    @rule(token=st.integers(0, 1))
    def oldest_gets_through(self, token: int) -> None:
        """Of the requests that run, the oldest gets its token, unless pending requests of this entry hold the pages."""
        if not self.scheduler.running:
            return
        oldest = min(self.scheduler.running, key=lambda r: r.rid)
        pinned = sum(-(-r.fed // PAGE_SIZE) for r in self.requests.values() if r.is_entry and r.state is State.PENDING)
        length = len(oldest.tokens)
        if -(-length // PAGE_SIZE) + pinned > self.scheduler.kv.counts()["total"]:
            return
        for _ in range(2 + 2 * len(self.scheduler.running) + CONTEXT):
            self._step(token)
            if len(oldest.tokens) > length:
                return
        raise AssertionError("the oldest request does not get through")

    @invariant()
    def books_balance(self) -> None:
        kv = self.scheduler.kv
        kv.check()
        counts = kv.counts()
        assert counts["free"] + counts["cached"] + counts["owned"] == counts["total"]
        slots = [r.slot for r in self.requests.values() if r.slot != NO_SLOT]
        assert len(set(slots)) == len(slots)
        if not slots:
            assert counts["owned"] == 0

    @invariant()
    def every_request_is_in_one_queue(self) -> None:
        scheduler = self.scheduler
        for one in self.requests.values():
            assert scheduler.running.count(one) == (one.state is State.RUNNING)
            assert scheduler.waiting.count(one) == (one.state is State.WAITING)
            assert (one.rid in scheduler.away) == (one.state is State.PENDING and not one.is_entry)
            assert one.state is not State.RUNNING or (one.slot != NO_SLOT and one.unfed >= 1)
            assert one.slot != NO_SLOT or one.fed == 0
        known = {*scheduler.away, *(r.rid for r in (*scheduler.running, *scheduler.waiting))}
        assert known <= set(self.requests)

    @invariant()
    def kv_holds_what_was_fed(self) -> None:
        for one in self.requests.values():
            found = [self.stored[self._place(one, position)] for position in range(one.fed)]
            assert found == one.tokens[: one.fed]

    def teardown(self) -> None:
        """Everybody comes back, and all get to their end."""
        for one in list(self.requests.values()):
            if one.state is State.PENDING:
                self.scheduler.add(one)
        for _ in range(CONTEXT * CONTEXT * (1 + len(self.requests))):
            if not self.requests:
                break
            assert self._step(1), f"nothing runs, {self.scheduler.counts()} are here"
        assert not self.requests
        self.books_balance()
        assert self.scheduler.kv.counts()["owned"] == 0


def check(examples: int, **more: Any) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            **more,
        ),
    )


def test_random_lives() -> None:
    check(60, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_lives_in_full() -> None:
    check(3000)
