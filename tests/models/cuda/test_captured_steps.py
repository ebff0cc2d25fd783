"""Device-resident steps on a GPU: the same as a plain loop in graphs and outside, whatever is in flight."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from models.batch import Batch
from models.cuda.captured_shapes import DECODE_ROWS, Shapes
from models.device_runner import BUCKETS, DeviceRunner
from models.kv_cache import KvCache
from models.resident import OWN_TOKEN, DeviceRoute, RoutedRows, StepRecord, StepRows
from models.rows import Runs
from tests.models.cuda.draws import CUTS, KINDS, Bench, asked, edge_setups, random_logits, random_setups, reference
from tests.models.hash_rows import PAGE, HashRows
from tests.models.schedules import ROUTES, Schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

PAGES = 32


def make(
    slots: int,
    buckets: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24),
    routes: tuple[DeviceRoute, ...] = ROUTES,
    extend_graphs: bool = True,
) -> tuple[DeviceRunner, HashRows]:
    decoder = HashRows(num_pages=slots * PAGES, max_pages=PAGES, device="cuda")
    runner = DeviceRunner(decoder, max_slots=slots, max_pages=PAGES, buckets=buckets, extend_graphs=extend_graphs)
    assert all(runner.set_routes(routes))
    return runner, decoder


def play(runner: DeviceRunner, decoder: HashRows, slots: int, seed: int, **changes: Any) -> Schedule:
    kv = KvCache(slots * PAGES, PAGE, slots, PAGES * PAGE, prefix_cache=False)
    oracle = HashRows(num_pages=1, max_pages=PAGES)
    return Schedule(runner, oracle.output_of, kv, random.Random(seed), **changes)


@pytest.fixture(scope="module")
def captured() -> tuple[DeviceRunner, HashRows]:
    runner, decoder = make(8)
    runner.capture()
    assert runner.graph_bytes > 0
    return runner, decoder


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_graphs_decide_as_a_plain_loop(depth: int) -> None:
    runner, decoder = make(8)
    runner.capture()
    played = play(runner, decoder, 8, depth, depth=depth)
    played.run(300)
    assert played.checked > 300
    assert played.dead or depth == 1


def test_kernels_outside_graphs_decide_as_a_plain_loop() -> None:
    runner, decoder = make(8)
    played = play(runner, decoder, 8, 5)
    played.run(150)
    assert played.dead


def test_extends_outside_graphs_decide_as_a_plain_loop() -> None:
    runner, decoder = make(8, extend_graphs=False)
    runner.capture()
    every = np.arange(2)
    assert runner.quick(StepRows(every, every, every, every))
    assert not runner.quick(StepRows(np.zeros(2, np.int64), every, every, every[1:]))
    played = play(runner, decoder, 8, 6)
    played.run(150)
    assert played.dead


@pytest.mark.parametrize("count", [0, 1])
def test_a_thousand_steps_with_no_and_with_one_route(count: int) -> None:
    runner, decoder = make(8, routes=ROUTES[:count])
    runner.capture()
    played = play(runner, decoder, 8, 11, routes=ROUTES[:count])
    seen: list[StepRecord] = []
    played.record = seen.append
    played.run(1000)
    assert played.dead
    assert all(0 < r.seconds < 1 for r in seen)


def test_steps_beyond_the_largest_bucket_mix_with_captured_ones() -> None:
    runner, decoder = make(12, buckets=(1, 2, 4))
    runner.capture()
    played = play(runner, decoder, 12, 3, largest_prompt=40, most_rows=60)
    played.run(300)
    assert played.dead


def test_every_bucket() -> None:
    buckets = [bucket for bucket in BUCKETS if bucket <= DECODE_ROWS]
    slots = buckets[-1]
    runner, decoder = make(slots, buckets=BUCKETS)
    runner.capture()
    oracle = HashRows(num_pages=1, max_pages=PAGES)
    for slot in range(slots):
        runner.setup(asked(slot=slot, prompt_length=1))
        runner.set_pages(slot, 0, [slot * PAGES, slot * PAGES + 1])
    ids: dict[int, list[int]] = {slot: [] for slot in range(slots)}
    for bucket in buckets:
        for count in {bucket, max(1, bucket - 1)}:
            every = np.arange(count)
            rows = StepRows(every, every % 90, np.zeros(count, np.int64), every)
            assert runner.quick(rows)
            runner.launch(rows)
            record = waited(runner)
            for slot in range(count):
                ids[slot] = [slot % 90]
                assert record.tokens[slot] == oracle.output_of(ids[slot]).logits.argmax()
            own = StepRows(every, np.full(count, OWN_TOKEN), np.zeros(count, np.int64), every)
            runner.launch(own)
            second = waited(runner)
            for slot in range(0, count, 7):
                history = [*ids[slot], int(record.tokens[slot])]
                assert second.tokens[slot] == oracle.output_of(history).logits.argmax()


def test_every_extend() -> None:
    """All token rows of a shape, dealt out to as many requests as it has logit rows, or one less."""
    extends = [shape for shape in Shapes(BUCKETS, extends=True).all if shape[0] > shape[1]]
    slots = max(wanted for _, wanted in extends)
    runner, decoder = make(slots, buckets=BUCKETS)
    runner.capture()
    oracle = HashRows(num_pages=1, max_pages=PAGES)
    for slot in range(slots):
        runner.setup(asked(slot=slot, prompt_length=1))
        runner.set_pages(slot, 0, list(range(slot * PAGES, slot * PAGES + 2)))
    for total, wanted in extends:
        for count in {wanted, max(1, wanted - 1)}:
            lengths = [len(part) for part in np.array_split(np.arange(total), count)]
            slot = np.repeat(np.arange(count), lengths)
            place = np.concatenate([np.arange(length) for length in lengths])
            rows = StepRows(slot, (slot + 3 * place) % 90, place, np.cumsum(lengths) - 1)
            assert runner.quick(rows)
            runner.launch(rows)
            record = waited(runner)
            assert record.alive.all()
            for number, length in enumerate(lengths):
                ids = [(number + 3 * known) % 90 for known in range(length)]
                assert record.tokens[number] == oracle.output_of(ids).logits.argmax()


class Planning(HashRows):
    """`Planner`: larger steps with runs of several rows."""

    def plans(self, rows: int, runs: Runs) -> bool:
        return rows > 4 and bool(runs.counts.max() > 2)


def test_steps_that_are_planned_are_launched_kernel_by_kernel() -> None:
    decoder = Planning(num_pages=8 * PAGES, max_pages=PAGES, device="cuda")
    runner = DeviceRunner(decoder, max_slots=8, max_pages=PAGES, buckets=(1, 2, 4, 8, 12, 16, 24))
    runner.set_routes(ROUTES)
    runner.capture()
    run, last = np.arange(8), np.array([7])
    assert not runner.quick(StepRows(run * 0, run, run, last))
    assert runner.quick(StepRows(run * 0 + run // 2, run, run % 2, last))
    assert runner.quick(StepRows(run[:4] * 0, run[:4], run[:4], last - 4))
    played = play(runner, decoder, 8, 7)
    played.run(200)
    assert played.dead


def waited(runner: DeviceRunner) -> StepRecord:
    while True:
        record = runner.poll()
        if record is not None:
            return record


def test_many_changes_go_ahead_of_their_step(captured: tuple[DeviceRunner, HashRows]) -> None:
    runner, _ = captured
    oracle = HashRows(num_pages=1, max_pages=PAGES)
    for shift in range(4):
        for _ in range(4):
            for slot in range(8):
                runner.set_pages(slot, 0, [(slot * PAGES + page + shift) % (8 * PAGES) for page in range(PAGES)])
                runner.setup(asked(slot=slot, stop_ids=tuple(range(20)), temperature=0.0))
        runner.setup(asked(slot=3, temperature=0.0, max_tokens=100))
        ids = list(range(17))
        for first in (0, 8, 16):
            part = np.arange(first, min(first + 8, 17))
            wanted = np.array([0]) if first == 16 else np.zeros(0, np.int64)
            rows = StepRows(np.full(len(part), 3), part, part, wanted)
            assert runner.quick(rows)
            runner.launch(rows)
        record = [waited(runner) for _ in range(3)][-1]
        assert record.tokens[0] == oracle.output_of(ids).logits.argmax()


def test_records_under_load(captured: tuple[DeviceRunner, HashRows]) -> None:
    """As many steps in flight as there can be, read in bursts."""
    runner, _ = captured
    for slot in range(8):
        runner.setup(asked(slot=slot, prompt_length=1, temperature=0.9, seed=slot))
        runner.set_pages(slot, 0, list(range(slot * PAGES, slot * PAGES + PAGES)))
    every = np.arange(8)
    first = StepRows(every, every, np.zeros(8, np.int64), every)
    own = StepRows(every, np.full(8, OWN_TOKEN), np.zeros(8, np.int64), every)
    answers = []
    for _ in range(20):
        rows = first
        records = []
        for _ in range(100):
            while runner.in_flight >= 15:
                records.append(waited(runner))
            runner.launch(rows)
            rows = own
        records += [waited(runner) for _ in range(runner.in_flight)]
        assert [b.step - a.step for a, b in zip(records, records[1:], strict=False)] == [1] * 99
        answers.append(np.array([r.tokens for r in records]))
    assert all((answer == answers[0]).all() for answer in answers)
    while runner.in_flight < 15:
        runner.launch(own)
    with pytest.raises(RuntimeError, match="poll their records"):
        runner.launch(own)
    while runner.in_flight:
        runner.poll()


def test_synchronous_steps(captured: tuple[DeviceRunner, HashRows]) -> None:
    runner, _ = captured
    oracle = HashRows(num_pages=1, max_pages=PAGES)
    table = np.zeros((8, PAGES), np.int32)
    table[2] = np.arange(PAGES) + 40
    for count in (3, 20, 60):
        ids = [(7 * place) % 90 for place in range(count)]
        every = np.arange(count)
        wanted = np.array([0, count // 2, count - 1])
        output = runner.step(Batch(np.array(ids), every, np.full(count, 2), table, wanted, np.zeros(3, np.int64)))
        for row, place in enumerate(wanted.tolist()):
            known = oracle.output_of(ids[: place + 1])
            assert torch.equal(output.logits[row].cpu(), known.logits[0])
            assert torch.equal(output.hidden[row].cpu(), known.hidden[0])


def test_a_launch_that_failed_is_repeated_with_other_rows(captured: tuple[DeviceRunner, HashRows]) -> None:
    """The entry of its turn may have been fetched by then."""
    runner, _ = captured
    steps: Any = runner._steps
    heard = steps._replaying

    def fails(_rows: int, _logit_rows: int) -> None:
        # Until then the step in flight has fetched what is not to be run.
        torch.cuda.synchronize()
        raise ConnectionError("a rank is gone")

    for slot in range(8):
        runner.setup(asked(slot=slot, prompt_length=1))
        runner.set_pages(slot, 0, list(range(slot * PAGES, slot * PAGES + PAGES)))
    every = np.arange(8)
    oracle = HashRows(num_pages=1, max_pages=PAGES)
    for trial in range(8):
        torch.cuda._sleep(20_000_000)
        runner.launch(StepRows(every, every, every * 0, every))
        steps._replaying = fails
        try:
            with pytest.raises(ConnectionError):
                runner.launch(StepRows(every, every + 40, every * 0, every))
        finally:
            steps._replaying = heard
        runner.launch(StepRows(every, every + trial, every * 0, every))
        waited(runner)
        wanted = [int(oracle.output_of([slot + trial]).logits.argmax()) for slot in range(8)]
        assert waited(runner).tokens.tolist() == wanted


def item(rows: RoutedRows) -> torch.Tensor:
    return rows.tokens * int(rows.index[0].item())


def waits(rows: RoutedRows) -> torch.Tensor:
    torch.cuda.synchronize()
    return rows.tokens * 0


@pytest.mark.parametrize("function", [item, waits])
def test_routes_that_wait_for_the_device_go_to_the_host(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    decoder = HashRows(num_pages=8, max_pages=PAGES, device="cuda")
    runner = DeviceRunner(decoder, max_slots=4, max_pages=PAGES, buckets=(1, 4))
    assert runner.set_routes([DeviceRoute("sync", function, ()), ROUTES[0]]) == (False, True)
    assert "sync" in caplog.text
    # The device and its allocator go on.
    torch.cuda.empty_cache()
    assert int(torch.ones(1 << 24, device="cuda").sum()) == 1 << 24
    torch.cuda.empty_cache()
    runner.capture()
    runner.setup(asked(slot=0, route=0))
    runner.setup(asked(slot=1, route=1, params=(1.0,)))
    every = np.arange(2)
    runner.launch(StepRows(every, every, np.zeros(2, np.int64), every))
    assert waited(runner).destinations.tolist() == [0, 1]


def test_recapture_for_other_routes(captured: tuple[DeviceRunner, HashRows]) -> None:
    decoder = HashRows(num_pages=8, max_pages=PAGES, device="cuda")
    runner = DeviceRunner(decoder, max_slots=4, max_pages=PAGES, buckets=(1, 4))
    for routes in ((), ROUTES[:1], ROUTES, ROUTES[1:2]):
        runner.set_routes(routes)
        runner.capture()
        runner.setup(asked(slot=0, route=len(routes) - 1, params=(9.0,) * 2 if routes else ()))
        one = np.zeros(1, np.int64)
        rows = StepRows(one, one, one, one)
        assert runner.quick(rows)
        runner.launch(rows)
        assert waited(runner).alive.all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [151_936, 32_000, 97])
def test_draws_are_the_reference_samplers(kind: str, vocab: int) -> None:
    count = 16
    bench = Bench.of(vocab, count, "cuda", on_device=True)
    chance = np.random.default_rng(3)
    for seed in range(4):
        logits = random_logits(kind, count, vocab, seed)
        setups = random_setups(count, vocab, chance)
        index = chance.integers(0, 9, size=count)
        record = bench.draw(logits.cuda(), setups, index)
        expected = reference(logits, setups, index).tolist()
        wrong = [row for row in range(count) if record.tokens[row] != expected[row]]
        assert not wrong, [(setups[row], int(record.tokens[row]), expected[row]) for row in wrong]
        assert not bench.kernels.counters.any()
        assert not bench.kernels.masses.any()


@pytest.mark.parametrize("kind", [*KINDS, "levels"])
@pytest.mark.parametrize("vocab", [97, 1000])
def test_cuts_end_at_the_reference_samplers_last_id(kind: str, vocab: int) -> None:
    logits = random_logits(kind, 1, vocab, 5)
    asks = [asked(temperature=0.7, top_k=k, top_p=p) for k, p in (*CUTS, (90, 1.0), (90, 0.7))]
    setups = [edge for ask in asks for edge in edge_setups(logits[0], ask, 4000)]
    assert setups
    rows, index = logits.expand(len(setups), -1), np.zeros(len(setups), np.int64)
    bench = Bench.of(vocab, len(setups), "cuda", on_device=True)
    expected = reference(rows, setups, index).tolist()
    assert bench.draw(rows.cuda().contiguous(), setups, index).tokens.tolist() == expected
    alone = Bench.of(vocab, 1, "cuda", on_device=True)
    assert [int(alone.draw(rows[:1].cuda(), [s], index[:1]).tokens[0]) for s in setups] == expected


@pytest.mark.parametrize("kind", ["tail", "levels"])
def test_top_p_is_a_share_of_all_that_top_k_leaves(kind: str) -> None:
    logits = random_logits(kind, 1, 150, 5)
    setups = edge_setups(logits[0], asked(temperature=1.0, top_k=40, top_p=0.39), 4000)
    rows, index = logits.expand(len(setups), -1).contiguous(), np.zeros(len(setups), np.int64)
    bench = Bench.of(150, len(setups), "cuda", on_device=True)
    assert bench.draw(rows.cuda(), setups, index).tokens.tolist() == reference(rows, setups, index).tolist()
