"""Device-resident steps on a CPU against a plain loop: any schedule, any depth, the same tokens, destinations and ends."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import device_runner
from models.batch import Batch, StepOutput
from models.device_routes import FAILED
from models.device_runner import DeviceRunner
from models.eager_steps import EagerSteps
from models.kv_cache import KvCache
from models.resident import NO_ROUTE, OWN_TOKEN, DeviceRoute, RoutedRows, SlotSetup, StepRecord, StepRows
from models.rows import Runs
from models.slots import MAX_PARAMS, MAX_STOP_IDS, SlotTable
from models.torch_rows import TorchRows
from models.torch_runner import TorchRunner
from tests.models.hash_rows import PAGE, VOCAB, HashRows
from tests.models.schedules import ROUTES, Schedule
from tests.models.tiny import tiny_qwen3

SLOTS = 6
PAGES = 16


def make(num_pages: int = 60) -> tuple[DeviceRunner, HashRows]:
    decoder = HashRows(num_pages=num_pages, max_pages=PAGES)
    return DeviceRunner(decoder, max_slots=SLOTS, max_pages=PAGES), decoder


def schedule(seed: int, depth: int, num_pages: int = 60) -> Schedule:
    runner, decoder = make(num_pages)
    assert runner.set_routes(ROUTES) == (True, True, True)
    kv = KvCache(num_pages, PAGE, SLOTS, PAGES * PAGE, prefix_cache=False)
    return Schedule(runner, decoder.output_of, kv, random.Random(seed), depth=depth)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=SLOTS), st.randoms())
def test_runs_of_few_rows_are_those_of_many(runs: list[tuple[int, bool]], dice: random.Random) -> None:
    following = np.array(dice.sample(range(100), SLOTS))
    slots, tokens, positions = [], [], []
    for slot, (count, own) in zip(dice.sample(range(SLOTS), len(runs)), runs, strict=True):
        first = 0 if own else dice.randrange(100)
        count = 1 if own else count
        slots += [slot] * count
        tokens += [OWN_TOKEN if own else 5] * count
        positions += range(first, first + count)
    rows = StepRows(np.array(slots), np.array(tokens), np.array(positions), np.array([len(slots) - 1]))
    few = device_runner._few_runs(rows, following)
    many = device_runner._find_runs(
        rows.slots, np.where(rows.tokens == OWN_TOKEN, following[rows.slots], rows.positions)
    )
    for one, other in (
        (few.firsts, many.firsts),
        (few.counts, many.counts),
        (few.starts, many.starts),
        (few.slots, many.slots),
    ):
        assert one.tolist() == other.tolist()
        assert one.dtype == other.dtype


def plain(slot: int = 0, **changes: object) -> SlotSetup:
    setup = SlotSetup(
        slot=slot,
        prompt_length=2,
        max_tokens=50,
        min_tokens=0,
        stop_ids=(),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=1,
        choice=0,
        route=NO_ROUTE,
        routable=True,
        params=(),
    )
    return replace(setup, **changes)  # type: ignore[arg-type]


def feed(runner: DeviceRunner, *rows: tuple[int, int, int], logits: tuple[int, ...] | None = None) -> StepRecord:
    """Launch (slot, token, position) rows, logits of the last one of each slot unless said, and wait."""
    slots, tokens, positions = (np.array(part, np.int64) for part in zip(*rows, strict=True))
    last = np.flatnonzero(np.diff(slots, append=-1)) if logits is None else np.array(logits, np.int64)
    runner.launch(StepRows(slots, tokens, positions, last))
    record = None
    while record is None:
        record = runner.poll()
    return record


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 2, 2, 4]), st.sampled_from([60, 12]))
def test_any_schedule_decides_as_a_plain_loop(seed: int, depth: int, num_pages: int) -> None:
    played = schedule(seed, depth, num_pages)
    played.run(30)
    assert played.checked > 10


def test_schedules_exercise_what_they_are_for() -> None:
    played = schedule(7, 2)
    seen: list[StepRecord] = []
    played.record = seen.append
    played.run(400)
    destinations = np.concatenate([r.destinations[r.alive] for r in seen])
    assert set(destinations.tolist()) == {0, 1, 2}
    assert played.dead > 20
    assert sum(int((~r.stays[r.alive & (r.destinations == 0)]).sum()) for r in seen) > 20
    assert len(played.answers) > 40
    assert all(r.seconds > 0 for r in seen)
    assert [r.step for r in seen] == list(range(1, len(seen) + 1))


def test_real_rows_equal_the_reference_runner(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path, context=PAGES * 4)
    load = {"num_pages": 40, "page_size": 4, "vocab_size": 258}
    decoder = TorchRows(TorchRunner.load(directory, **load))  # type: ignore[arg-type]
    reference = TorchRunner.load(directory, **load)  # type: ignore[arg-type]
    table = np.arange(PAGES, dtype=np.int32)[None]

    def model(ids: list[int]) -> StepOutput:
        count = len(ids)
        output = reference.step(
            Batch(
                np.array(ids),
                np.arange(count),
                np.zeros(count, np.int64),
                table,
                np.array([count - 1]),
                np.zeros(1, np.int64),
            )
        )
        return StepOutput(output.logits.clone(), output.hidden.clone())

    runner = DeviceRunner(decoder, max_slots=4, max_pages=PAGES)
    runner.set_routes(ROUTES)
    kv = KvCache(40, 4, 4, PAGES * 4, prefix_cache=False)
    played = Schedule(runner, model, kv, random.Random(3), vocab=258)
    played.run(120)
    assert played.dead
    assert played.checked > 150


def test_synchronous_steps_between_resident_ones(tmp_path: Path) -> None:
    runner, decoder = make()
    runner.setup(plain(slot=1))
    runner.set_pages(1, 0, [5, 6])
    first = feed(runner, (1, 3, 0), (1, 4, 1))
    token = int(first.tokens[0])
    table = np.zeros((SLOTS, PAGES), np.int32)
    table[1, :2], table[3, :3] = [5, 6], [9, 2, 7]
    ids = [8, 8, 1, 2, 3, 4, 5, 6, 7]
    batch = Batch(
        np.array([*ids, 11]),
        np.array([*range(9), 2]),
        np.array([3] * 9 + [1]),
        table,
        np.array([0, 4, 8, 9]),
        np.zeros(4, np.int64),
    )
    output = runner.step(batch)
    for row, known in enumerate(([8], ids[:5], ids, [3, 4, 11])):
        assert torch.equal(output.logits[row], decoder.output_of(known).logits[0])
        assert torch.equal(output.hidden[row], decoder.output_of(known).hidden[0])
    # The slot's own state has not moved: its own token is fed at its own position.
    second = feed(runner, (1, OWN_TOKEN, 0))
    assert second.alive[0]
    assert second.tokens[0] == decoder.output_of([3, 4, token]).logits.argmax()


def test_calls_that_need_an_idle_device_say_so() -> None:
    runner, _ = make()
    runner.setup(plain())
    runner.launch(StepRows(np.array([0]), np.array([1]), np.array([0]), np.array([0])))
    batch = Batch(*(np.array([0]) for _ in range(3)), np.zeros((SLOTS, PAGES), np.int32), np.array([0]), np.array([0]))
    for call in (lambda: runner.step(batch), lambda: runner.set_routes(()), runner.capture):
        with pytest.raises(RuntimeError, match="1 steps in flight"):
            call()
    assert runner.in_flight == 1
    assert runner.poll() is not None
    assert runner.in_flight == 0
    assert runner.poll() is None
    runner.step(batch)


class Watched(EagerSteps):
    """Keeps what it hears of runs."""

    def __init__(self, decoder: HashRows, slots: SlotTable) -> None:
        super().__init__(decoder, slots)
        self.heard: list[tuple[str, list[int], list[int]]] = []

    def quick(self, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> bool:
        self.heard.append(("quick", runs.starts.tolist(), runs.counts.tolist()))
        return super().quick(rows, runs, routes)

    def launch(self, number: int, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> None:
        self.heard.append(("launch", runs.starts.tolist(), runs.counts.tolist()))
        super().launch(number, rows, runs, routes)


def test_runs_are_those_of_the_step_to_come() -> None:
    decoder = HashRows(num_pages=60, max_pages=PAGES)
    runner = DeviceRunner(decoder, max_slots=SLOTS, max_pages=PAGES, steps=partial(Watched, decoder))
    steps = runner._steps
    assert isinstance(steps, Watched)
    runner.setup(plain(slot=2))
    runner.set_pages(2, 0, [0, 1])
    feed(runner, (2, 5, 0), (2, 6, 1))
    own = StepRows(np.array([2]), np.array([OWN_TOKEN]), np.array([0]), np.array([0]))
    for _ in range(2):
        # The same object each time, as a worker gives it.
        runner.quick(own)
        runner.quick(own)
        runner.launch(own)
    assert steps.heard == [
        ("launch", [0], [2]),
        *[("quick", [2], [1])] * 2,
        ("launch", [2], [1]),
        *[("quick", [3], [1])] * 2,
        ("launch", [3], [1]),
    ]


def test_a_row_without_logits_leaves_the_slot_as_it_was() -> None:
    runner, decoder = make()
    runner.setup(plain())
    runner.set_pages(0, 0, [0, 1])
    record = feed(runner, (0, 1, 0), (0, 2, 1), logits=())
    assert len(record.tokens) == 0
    assert not feed(runner, (0, OWN_TOKEN, 0)).alive[0]
    record = feed(runner, (0, 3, 2))
    assert record.alive[0]
    assert record.tokens[0] == decoder.output_of([1, 2, 3]).logits.argmax()


def test_first_token_of_an_unroutable_slot_is_committed() -> None:
    runner, _ = make()
    always = DeviceRoute("always", lambda rows: torch.full_like(rows.tokens, 2), ())
    runner.set_routes([always])
    runner.setup(plain(route=0, routable=False))
    first = feed(runner, (0, 1, 0))
    assert (first.destinations[0], first.stays[0]) == (0, True)
    second = feed(runner, (0, OWN_TOKEN, 0))
    assert (second.alive[0], second.destinations[0], second.stays[0]) == (True, 2, False)
    third = feed(runner, (0, OWN_TOKEN, 0))
    assert not third.alive[0]


def no_route(rows: RoutedRows) -> torch.Tensor:
    raise KeyError("state")


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        (DeviceRoute("mine", no_route, ()), "KeyError"),
        (DeviceRoute("mine", lambda rows: torch.zeros(1), ()), "no destination"),
        (DeviceRoute("mine", lambda rows: rows.tokens[:1], ()), "no destination"),
        (DeviceRoute("mine", lambda rows: rows.tokens, tuple("abcdefghi")), f"a slot holds {MAX_PARAMS}"),
    ],
)
def test_routes_that_cannot_run_here_go_to_the_host(
    route: DeviceRoute, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner, _ = make()
    with caplog.at_level(logging.WARNING):
        assert runner.set_routes([ROUTES[0], route]) == (True, False)
    assert "mine" in caplog.text
    assert reason in caplog.text
    runner.setup(plain(slot=0, route=1))
    runner.setup(plain(slot=1, route=0, params=(1.0,)))
    record = feed(runner, (0, 1, 0), (1, 1, 0))
    assert record.destinations.tolist() == [0, 1]


def test_a_route_that_fails_later_costs_its_own_rows_only(caplog: pytest.LogCaptureFixture) -> None:
    runner, _ = make()

    def moody(rows: RoutedRows) -> torch.Tensor:
        if (rows.params["x"] > 5).any():
            raise ValueError("too much")
        return torch.ones_like(rows.tokens)

    runner.set_routes([ROUTES[0], DeviceRoute("moody", moody, ("x",))])
    runner.setup(plain(slot=0, route=1, params=(6.0,)))
    runner.setup(plain(slot=1, route=0, params=(1.0,)))
    runner.setup(plain(slot=2))
    record = feed(runner, (0, 1, 0), (1, 1, 0), (2, 1, 0))
    assert record.destinations.tolist() == [FAILED, 1, 0]
    assert record.stays.tolist() == [False, False, True]
    assert "too much" in caplog.text


def test_many_changes_at_once_and_the_last_word_counts() -> None:
    runner, decoder = make(num_pages=SLOTS * PAGES)
    for round_ in range(3):
        for slot in range(SLOTS):
            runner.set_pages(slot, 0, [(slot * PAGES + page + round_) % (SLOTS * PAGES) for page in range(PAGES)])
            runner.setup(plain(slot=slot, stop_ids=tuple(range(20 + round_)), prompt_length=1))
    length = PAGES * PAGE
    rows = [(2, token % VOCAB, token) for token in range(length)]
    record = feed(runner, *rows)
    assert record.tokens[0] == decoder.output_of([token % VOCAB for token in range(length)]).logits.argmax()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": SLOTS}, "slot"),
        ({"stop_ids": tuple(range(MAX_STOP_IDS + 1))}, "stop_ids"),
        ({"params": (0.0,) * (MAX_PARAMS + 1)}, "params"),
        ({"route": 0}, "route: 0, but 0 routes are set"),
    ],
)
def test_what_a_slot_cannot_hold_is_refused(changes: dict[str, object], message: str) -> None:
    runner, _ = make()
    with pytest.raises(ValueError, match=message):
        runner.setup(plain(**changes))


def test_pages_outside_the_table_are_refused() -> None:
    runner, _ = make()
    for slot, first, count in ((SLOTS, 0, 1), (0, PAGES, 1), (0, PAGES - 1, 2), (-1, 0, 1)):
        with pytest.raises(ValueError, match="outside a table"):
            runner.set_pages(slot, first, [0] * count)
