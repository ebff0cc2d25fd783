"""The recorder of a decode loop by a clock of its own: what every moment counts as, what is kept, and what is not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.batch import ModelRunner
from models.script import ScriptRunner
from tests.harness import Cluster
from tests.worker.resident import FakeResident
from trouterd.batching.launch import Reason
from trouterd.config import Route
from trouterd.tracing.events import EVENTS, Event, Handoff, Idle, Mark, Queues, State, Step, Summary, Work
from trouterd.worker.launching import Launching
from trouterd.worker.recorder import Recorder
from trouterd.worker.scheduler import Chunk, Scheduler
from trouterd.worker.stats import Stats
from trouterd.worker.stepper import Outcome
from trouterd.worker.worker import Worker

PROMPT = 10
T = TypeVar("T")


def chunk(rid: int = 1, first: int = PROMPT, count: int = 1, sent: float = 0.0, source: int = 0) -> Chunk:
    request = SimpleNamespace(
        rid=rid, prompt_length=PROMPT, handoff_sent_ns=round(sent * 1e9), visit_source=source, residency=0
    )
    wanted = int(first + count >= PROMPT)
    return Chunk(cast(Any, request), first, count, wanted, False, 0)


class Bench:
    """A recorder and everything that it looks at."""

    def __init__(self, *, in_flight: bool = False, capacity: int = 1000, running: int = 0, now: float = 100.0) -> None:
        self.now = now
        self.scheduler = SimpleNamespace(running=[None] * running, away={}, waiting=[], preemptions=0)
        self.rule = SimpleNamespace(reason=None, ready=0, threshold=1, holding=False)
        self.stats = SimpleNamespace(submitted=0, finished=Counter[str](), tokens=0)
        self.in_flight = int(in_flight)
        self.recorder = Recorder(
            cast(Scheduler, self.scheduler),
            cast(Launching, self.rule),
            cast(Stats, self.stats),
            in_flight=in_flight,
            capacity=capacity,
            clock=lambda: self.now,
        )

    def turn(self) -> None:
        self.recorder.turn()

    def launch(self, *chunks: Chunk) -> list[Chunk]:
        launched = list(chunks or [chunk()])
        self.recorder.launch(launched, self.in_flight)
        self.in_flight += 1
        return launched

    def looked(self, *, held: bool = False) -> None:
        self.recorder.looked(self.in_flight, held=held)

    def outcome(self, chunks: list[Chunk], device: float, destinations: list[int] | None = None) -> None:
        self.in_flight -= 1
        rows = sum(c.wants_logits for c in chunks)
        ids = [7] * rows
        decided = Outcome(chunks, [True] * rows, ids, destinations or [0] * rows, [False] * rows, device)
        self.recorder.outcome(decided, self.in_flight)

    def events(self) -> list[Event]:
        return EVENTS.decode(self.recorder.log.take(1 << 20))


def of(kind: type[T], events: list[Event]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def spent(summary: Summary, **seconds: float) -> None:
    """Exactly these, and nothing else."""
    given = {name: value for name, value in summary.spent.items() if value}
    assert given == pytest.approx(seconds)
    assert sum(summary.spent.values()) == pytest.approx(summary.seconds)
    assert sum(summary.shares.values()) == pytest.approx(1)


def test_a_pause_is_what_it_turns_out_to_be() -> None:
    bench = Bench()
    bench.now += 3  # idle
    bench.turn()
    bench.now += 0.25  # applies what has arrived
    chunks = bench.launch()
    bench.now += 1
    bench.looked()
    bench.now += 1
    bench.outcome(chunks, 1.5)
    bench.now += 0.5  # commits; the requests stay
    bench.turn()
    bench.now += 0.25
    chunks = bench.launch()
    bench.looked()
    bench.now += 2
    bench.outcome(chunks, 2.0)
    bench.now += 0.5  # commits; all of them leave
    bench.turn()
    bench.looked()
    bench.now += 1
    bench.turn()
    bench.now += 0.125
    bench.looked()  # woken for nothing
    bench.now += 1
    summary = bench.recorder.finish()
    spent(summary, step=4.0, loop=0.25 + 0.75, nothing_ready=3 + 0.5 + 1 + 0.125 + 1)
    assert (summary.steps, summary.busy) == (2, 3.5)
    assert summary.shares["overhead"] == pytest.approx(0.5 / summary.seconds)
    idle = [(event.state, event.begin - 100, event.end - 100) for event in of(Idle, bench.events())]
    assert idle == [
        (State.NOTHING, 0, 3),
        (State.LOOP, 3, 3.25),
        (State.LOOP, 5.25, 6.0),
        (State.NOTHING, 8.0, 10.625),
    ]


def test_held_and_no_room_are_told_from_nothing_ready() -> None:
    bench = Bench(running=1)
    bench.turn()
    bench.looked(held=True)
    bench.now += 2
    bench.turn()
    bench.looked()  # the pool is full
    bench.now += 3
    bench.turn()
    bench.scheduler.running.clear()
    bench.looked()
    bench.now += 4
    spent(bench.recorder.finish(), held=2.0, no_room=3.0, nothing_ready=4.0)


def test_a_queued_step_begins_where_the_one_before_ends() -> None:
    bench = Bench()
    bench.turn()
    first = bench.launch(chunk(1))
    bench.now += 1
    second = bench.launch(chunk(1))
    bench.looked()
    bench.now += 3
    bench.outcome(first, 3.0)
    bench.now += 1
    bench.turn()
    bench.looked()
    bench.now += 2
    # The first one's end was seen a second late: the device was at work on the second one by then.
    bench.outcome(second, 3.75)
    summary = bench.recorder.finish()
    spent(summary, step=7.0)
    assert summary.busy == 6.75
    steps = of(Step, bench.events())
    assert [(s.launched - 100, s.begin - 100, s.end - 100, s.queued) for s in steps] == [(0, 0, 4, 0), (1, 4, 7, 1)]


def test_the_device_is_never_busier_than_time_has_passed() -> None:
    bench = Bench(in_flight=True)
    bench.now += 1
    unknown = [chunk()]
    bench.outcome(unknown, 5.0)  # most of it before the recording began
    bench.now += 1
    bench.turn()
    chunks = bench.launch()
    bench.looked()
    bench.now += 1
    summary = bench.recorder.finish()  # not ended: at work, as far as anybody knows
    spent(summary, step=2.0, loop=1.0)
    assert summary.busy == 2.0
    assert summary.steps == 1
    steps = of(Step, bench.events())
    assert [(s.begin - 100, s.end - 100, s.device, s.reason) for s in steps] == [
        (0, 1, 5, "unknown"),
        (2, 3, 0, "none"),
    ]
    assert len(chunks) == steps[1].requests


def test_a_step_says_what_was_in_it() -> None:
    bench = Bench()
    bench.rule.reason, bench.rule.ready, bench.rule.threshold = Reason.PREFILL, 2, 3
    bench.turn()
    bench.now = 101.0
    rows = bench.launch(
        chunk(1, PROMPT + 4),
        chunk(2, 2, 5),  # in the middle of its prompt
        chunk(3, 6, 4),  # the last of its rows gives a token
        chunk(4, PROMPT + 1, 3, sent=100.75, source=1),
    )
    bench.now = 103.0
    bench.outcome(rows, 1.5, [0, 1, 0])
    summary = bench.recorder.finish()
    events = bench.events()
    assert of(Step, events) == [
        Step(101.0, 101.0, 103.0, 1.5, 4, 13, 5 + 3, 1, 3, 1, "prefill", 3, 2, 0),
    ]
    assert of(Handoff, events) == [Handoff(4, 1, 100.75, 101.0, 101.0)]
    assert summary.prefill == summary.busy == 1.5
    assert (summary.alive, summary.handoffs, summary.latencies) == (3, 1, (0.25, 0.25))


def test_a_failed_launch_is_no_step() -> None:
    bench = Bench()
    bench.turn()
    earlier = bench.launch(chunk(1))
    bench.now += 1
    bench.launch(chunk(2))
    bench.in_flight -= 1
    bench.recorder.failed(bench.in_flight)
    bench.now += 1
    bench.outcome(earlier, 1.5)
    bench.now += 1
    bench.turn()
    alone = bench.launch(chunk(3))
    bench.in_flight -= 1
    bench.recorder.failed(bench.in_flight)
    bench.now += 1
    bench.turn()
    bench.launch(chunk(4))
    summary = bench.recorder.finish()
    spent(summary, step=2.0, loop=2.0)
    assert summary.steps == 1
    assert len(of(Step, bench.events())) == 2
    assert len(alone) == 1


def test_what_the_loop_does_and_who_comes_and_goes() -> None:
    bench = Bench()
    bench.turn()
    bench.stats.submitted = 2
    bench.scheduler.running = [None, None]
    bench.now += 1
    chunks = bench.launch()
    bench.now += 0.5
    bench.looked()
    bench.now += 2
    bench.outcome(chunks, 2.0)
    bench.stats.finished["stop"] += 1
    bench.stats.finished["abort"] += 1
    bench.stats.tokens += 5
    bench.scheduler.preemptions += 1
    bench.scheduler.running = []
    bench.now += 1
    bench.turn()
    bench.looked()
    assert bench.recorder.finish().tokens == 5
    events = bench.events()
    assert [(e.name, e.begin - 100, e.end - 100) for e in of(Work, events)] == [
        ("events", 0, 1),
        ("launch", 1, 1.5),
        ("outcome", 3.5, 4.5),
    ]
    assert [(e.name, e.count) for e in of(Mark, events)] == [("admitted", 2), ("finished", 2), ("preempted", 1)]
    assert [(e.running, e.away, e.waiting) for e in of(Queues, events)] == [(2, 0, 0), (0, 0, 0)]


def test_the_ring_drops_the_oldest_and_the_summary_keeps_all() -> None:
    bench = Bench(capacity=50)
    for _ in range(100):
        bench.turn()
        chunks = bench.launch(chunk(sent=bench.now - 0.5))
        bench.looked()
        bench.now += 1
        bench.outcome(chunks, 1.0)
    summary = bench.recorder.finish()
    spent(summary, step=100.0)
    assert (summary.steps, summary.handoffs, summary.events) == (100, 100, 50)
    assert summary.dropped > 100
    assert len(bench.recorder.log) == 50
    frames = [EVENTS.decode(bench.recorder.log.take(20)) for _ in range(4)]
    assert [len(frame) for frame in frames] == [20, 20, 10, 0]
    assert of(Step, frames[2])[-1].end == bench.now


class Loop:
    """A decode loop by chance, with up to three steps in flight; it hands its recorder what the real one does."""

    def __init__(self, dice: random.Random, start: int) -> None:
        self.dice, self.start = dice, start
        self.bench: Bench | None = None
        self.now = 100.0
        self.calls = 0
        self.flying: list[list[Chunk]] = []

    def _hook(self, name: str, *args: Any, **options: Any) -> None:
        self.now += self.dice.choice([0.0, 0.001, 0.5, 3.0])
        self.calls += 1
        if self.calls == self.start:
            flying = bool(self.flying) or name == "outcome"
            self.bench = Bench(in_flight=flying, running=self.dice.randint(0, 1), now=self.now)
        elif self.bench is not None:
            self.bench.now = self.now
            getattr(self.bench.recorder, name)(*args, **options)

    def turn(self) -> None:
        dice = self.dice
        self._hook("turn")
        for _ in range(dice.randint(0, 3 - len(self.flying))):
            chunks = [chunk(rid, dice.randint(0, PROMPT), sent=self.now * dice.randint(0, 1)) for rid in range(3)]
            self._hook("launch", chunks, len(self.flying))
            if dice.random() < 0.1:
                self._hook("failed", len(self.flying))
            else:
                self.flying.append(chunks)
        self._hook("looked", len(self.flying), held=not self.flying and dice.random() < 0.5)
        for _ in range(dice.randint(0, len(self.flying))):
            chunks = self.flying.pop(0)
            rows = sum(c.wants_logits for c in chunks)
            decided = Outcome(chunks, [True] * rows, [0] * rows, [0] * rows, [False] * rows, dice.random() * 4)
            self._hook("outcome", decided, len(self.flying))


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), start=st.integers(1, 40), turns=st.integers(10, 60))
def test_every_moment_counts_once(seed: int, start: int, turns: int) -> None:
    loop = Loop(random.Random(seed), start)
    for _ in range(turns):
        loop.turn()
    if loop.bench is None:
        return
    loop.bench.now = loop.now + 1
    summary = loop.bench.recorder.finish()
    assert sum(summary.spent.values()) == pytest.approx(summary.seconds)
    assert 0 <= summary.prefill <= summary.busy + 1e-9
    assert summary.busy <= summary.spent["step"] + 1e-9
    assert all(seconds >= 0 for seconds in summary.spent.values())
    events = loop.bench.events()
    row = sorted((e.begin, e.end) for e in events if isinstance(e, Step | Idle))
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in zip(row, row[1:], strict=False))
    assert row[0][0] >= summary.begin
    assert row[-1][1] <= summary.end
    work = sorted((e.begin, e.end) for e in of(Work, events))
    assert all(end <= begin for (_, end), (begin, _) in zip(work, work[1:], strict=False))


Device = Callable[[ModelRunner], ModelRunner]


@pytest.mark.parametrize("device", [lambda runner: runner, FakeResident], ids=["synchronous", "pipelined"])
async def test_decode_loops_are_recorded_without_ids(device: Device) -> None:
    """Two real workers: every hand-off is seen once where it arrives, and ids stay out of it."""
    small, large = [1_000_003 + i for i in range(40)], [2_000_003 + i for i in range(40)]
    runners = {"small": ScriptRunner(small, vocab_size=3_000_000), "large": ScriptRunner(large, vocab_size=3_000_000)}
    route = Route(["small", "large"], "every_n", {"shape": "visit", "n": 4})
    cluster = Cluster({name: device(runner) for name, runner in runners.items()}, {"r": route})
    cluster.workers["large"].launching.configure([1, 1, 2], 0.005, relax=False)
    recorders = {name: record(worker) for name, worker in cluster.workers.items()}
    async with cluster.running():
        await asyncio.gather(*(cluster.generate("r", [2_900_001, 2_900_002], max_tokens=24) for _ in range(4)))
        await cluster.settled()
    summaries = {name: recorder.finish() for name, recorder in recorders.items()}
    sent = [message for message in cluster.trace if not message.partial and not message.finish]
    assert sum(summary.handoffs for summary in summaries.values()) == len(sent) > 0
    assert {name: s.steps for name, s in summaries.items()} == {n: w.stats.steps for n, w in cluster.workers.items()}
    assert sum(summary.tokens for summary in summaries.values()) == 4 * 24
    for name, recorder in recorders.items():
        raw = recorder.log.take(1 << 20)
        events = EVENTS.decode(raw)
        assert {event.source for event in of(Handoff, events)} == {1 if name == "small" else 0}
        assert not any(step.reason == "unknown" for step in of(Step, events))
        assert any(step.threshold == 2 and step.ready >= 2 for step in of(Step, events)) == (name == "large")
        numbers = [value for event in msgspec.msgpack.decode(raw) for value in event if isinstance(value, int)]
        assert max(numbers) < 1_000_000


async def test_a_recording_may_begin_in_the_middle_and_end_while_steps_are_in_flight() -> None:
    runner = FakeResident(ScriptRunner([10 + i for i in range(64)], vocab_size=258, cycle=True), 2)
    cluster = Cluster({"small": runner}, {})
    worker = cluster.workers["small"]
    async with cluster.running():
        _, answer = cluster.submit("small", [1, 2, 3], max_tokens=400)
        for length in (10, 130, 250):
            await answer.until(length)
            recorder = record(worker)
            await answer.until(length + 100)
            worker.recorder = None
            summary = recorder.finish()
            assert sum(summary.spent.values()) == pytest.approx(summary.seconds)
            assert summary.steps >= 90
            steps = of(Step, EVENTS.decode(recorder.log.take(1 << 20)))
            assert any(step.queued for step in steps)
        await answer.done.wait()
        await cluster.settled()


def record(worker: Worker) -> Recorder:
    worker.recorder = Recorder(worker.scheduler, worker.launching, worker.stats, in_flight=worker.busy)
    return worker.recorder
