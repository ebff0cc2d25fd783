"""The kernels of a step on the CPU, through Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py"

from models import device_routes
from models.batch import Batch, StepOutput
from models.cuda import step_kernels
from models.cuda.inbox import HEADER_WORDS, entry_of
from models.cuda.step_kernels import StepKernels
from models.device_runner import DeviceRunner
from models.kv_cache import KvCache
from models.resident import DeviceRoute, StepRecord, StepRows
from models.rows import RowDecoder, Runs
from models.slots import RECORD_WORDS, SlotTable
from tests.models.cuda.draws import CUTS, KINDS, Bench, asked, edge_setups, random_logits, random_setups, reference
from tests.models.hash_rows import PAGE, HashRows
from tests.models.schedules import ROUTES, Schedule

# The interpreter computes lanes that a mask or a where drops afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLOTS = 6
PAGES = 16
ENTRY_ROWS = 70
ENTRY_CHANGES = 40


@pytest.fixture(params=[pytest.param("usual", marks=pytest.mark.slow), "small"])
def vocab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The vocabulary for chunks of the usual size, or for many small ones with a list that overflows."""
    if request.param == "usual":
        return 5000
    monkeypatch.setattr(step_kernels, "_CHUNK", 32)
    monkeypatch.setattr(step_kernels, "_LIST", 40)
    monkeypatch.setattr(step_kernels, "_TILE", 16)
    monkeypatch.setattr(step_kernels, "_BUCKETS", 16)
    return 150


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if number else kind for number, kind in enumerate(KINDS)]
)
def test_draws_are_the_reference_samplers(kind: str, vocab: int) -> None:
    count = 3
    bench = Bench.of(vocab, count, "cpu", on_device=False)
    chance = np.random.default_rng(3)
    for seed in range(2):
        logits = random_logits(kind, count, vocab, seed)
        setups = random_setups(count, vocab, chance)
        index = chance.integers(0, 9, size=count)
        record = bench.draw(logits, setups, index)
        assert record.alive.all()
        assert record.tokens.tolist() == reference(logits, setups, index).tolist(), setups
        assert not bench.kernels.counters.any()
        assert not bench.kernels.masses.any()


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        ("levels", CUTS[:2]),
        ("tail", ((40, 0.39),)),
        ("flat", CUTS[1:2]),
        *(pytest.param(kind, CUTS[1:4], marks=pytest.mark.slow) for kind in KINDS if kind != "huge"),
    ],
)
@pytest.mark.parametrize("vocab", ["small"], indirect=True)
def test_cuts_end_at_the_reference_samplers_last_id(kind: str, cuts: Sequence[tuple[int, float]], vocab: int) -> None:
    logits = random_logits(kind, 1, vocab, 5)
    asks = [asked(temperature=1.0, top_k=k, top_p=p) for k, p in cuts]
    setups = [edge for ask in asks for edge in edge_setups(logits[0], ask, 3000)]
    assert setups
    rows = logits.expand(len(setups), -1)
    bench, index = Bench.of(vocab, len(setups), "cpu", on_device=False), np.zeros(len(setups), np.int64)
    record = bench.draw(rows, setups, index)
    assert record.tokens.tolist() == reference(rows, setups, index).tolist(), setups
    assert not bench.kernels.counters.any()
    assert not bench.kernels.masses.any()


@pytest.mark.parametrize(
    ("kind", "top_k"),
    [
        ("flat", 0),
        pytest.param("equal", 0, marks=pytest.mark.slow),
        pytest.param("flat", 100, marks=pytest.mark.slow),
    ],
)
def test_a_large_vocabulary_is_cut_as_by_the_reference_sampler(kind: str, top_k: int) -> None:
    vocab = 151_936
    logits = random_logits(kind, 1, vocab, 2)
    bench = Bench.of(vocab, 1, "cpu", on_device=False)
    setups = [asked(temperature=0.9, top_p=0.8, top_k=top_k, seed=4)]
    index = np.zeros(1, np.int64)
    record = bench.draw(logits, setups, index)
    assert record.tokens.tolist() == reference(logits, setups, index).tolist()
    assert not bench.kernels.masses.any()


def write_entry(kernels: StepKernels, turn: int, mark: int) -> list[list[int]]:
    """Write made-up rows and changes of the page table; slots, tokens, positions and logit rows that shall come out."""
    every = np.arange(ENTRY_ROWS)
    rows = StepRows(every % SLOTS, mark + every, turn + every, every)
    pages = np.stack([SLOTS * RECORD_WORDS + np.arange(ENTRY_CHANGES), np.full(ENTRY_CHANGES, mark)]).astype(np.int32)
    runs = Runs(every, np.ones(ENTRY_ROWS, np.int64), rows.positions, rows.slots)
    kernels.inbox.write(turn, rows, runs, pages, ENTRY_ROWS)
    return [part.tolist() for part in (rows.slots, rows.tokens, rows.positions, rows.logit_rows)]


@pytest.mark.parametrize("case", ["ahead", "late", "half written", "written again"])
def test_entries_fetched_ahead_are_those_of_their_turn(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_kernels, "_BLOCK", 32)
    slots = SlotTable(SLOTS, ENTRY_CHANGES, torch.device("cpu"))
    kernels = StepKernels(slots, 50, rows=ENTRY_ROWS, wanted=ENTRY_ROWS, entries=2, on_device=False)
    rows = kernels.rows(ENTRY_ROWS, ENTRY_ROWS)
    mark = 100
    wanted = write_entry(kernels, 0, mark)
    for turn in range(1, 6):
        kernels.take_in(rows)
        assert [part.tolist() for part in (rows.slots, rows.tokens, rows.positions, rows.logit_rows)] == wanted
        assert (slots.page_table.flatten()[:ENTRY_CHANGES] == mark).all()
        kernels.clock[0] += 1
        mark = turn * 1000
        place = kernels.inbox.memory[turn % 2]
        if case != "late":
            wanted = write_entry(kernels, turn, mark)
        if case == "half written":
            place[4] -= 2
            place[HEADER_WORDS + ENTRY_ROWS :] = 7
        kernels.fetch(5 if turn % 2 else ENTRY_ROWS)
        if case == "ahead":
            # Only the copy is right now.
            place.fill_(7)
            continue
        if case == "written again":
            kernels.forget()
            mark += 500
        wanted = write_entry(kernels, turn, mark)


class InterpretedSteps:
    """`Steps` that run the kernels one by one, each second step from an entry of its own."""

    graph_bytes = 0

    def __init__(self, decoder: RowDecoder, slots: SlotTable) -> None:
        self.decoder = decoder
        self.slots = slots
        self.kernels = StepKernels(slots, decoder.vocab_size, rows=32, wanted=32, entries=5, on_device=False)
        self.routes: Sequence[DeviceRoute] = ()
        self.turn = 0
        self.open: deque[tuple[int, int]] = deque()

    def capture(self) -> None: ...

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        self.routes = routes
        self.kernels.set_routes(len(routes))
        return (True,) * len(routes)

    def quick(self, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> bool:
        return False

    def skips(self, rows: int) -> bool:
        return False

    def launch(self, number: int, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> None:
        kernels, count = self.kernels, len(rows.logit_rows)
        if number % 2:
            device_rows = kernels.fresh_rows(len(rows), count)
            kernels.take_in(device_rows, torch.from_numpy(entry_of(rows, runs, self.slots.take(), count)))
        else:
            # Padded, as a bucket is.
            device_rows = kernels.rows(len(rows) + 3, count + 1)
            kernels.inbox.write(self.turn, rows, runs, self.slots.take(), count)
            kernels.take_in(device_rows)
        output = self.decoder.forward(device_rows, runs)
        wanted = len(device_rows.logit_rows)
        if wanted:
            kernels.draw(device_rows, output.logits, ends=not routes)
        for route in routes:
            inputs = kernels.route_inputs(route, wanted)
            kernels.answers[route, :wanted] = device_routes.ask(self.routes[route], output, inputs)
        if routes or not wanted:
            kernels.end(device_rows)
        self.open.append((number, count))
        self.turn += 1

    def poll(self) -> StepRecord | None:
        number, count = self.open[0]
        record = self.kernels.records.read(self.turn - len(self.open), number, count)
        if record is not None:
            self.open.popleft()
        return record

    def step(self, batch: Batch, runs: Runs) -> StepOutput:
        raise NotImplementedError


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_schedules_decide_as_a_plain_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_kernels, "_CHUNK", 32)
    decoder = HashRows(num_pages=60, max_pages=PAGES)
    runner = DeviceRunner(decoder, max_slots=SLOTS, max_pages=PAGES, steps=partial(InterpretedSteps, decoder))
    runner.set_routes(ROUTES)
    kv = KvCache(60, PAGE, SLOTS, PAGES * PAGE, prefix_cache=False)
    played = Schedule(runner, decoder.output_of, kv, random.Random(seed))
    played.run(60)
    assert played.dead
    assert played.checked > 60
