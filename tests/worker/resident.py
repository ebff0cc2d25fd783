"""A device without a device: any model runner behind the `Resident` interface, with a stream that runs as late as it likes.

Everything that the host asks for goes into a queue and is done in order, when somebody polls and the dice say so. What runs then
sees the page table, the slots and the KV of that place in the queue: a host that changes its mind too early, frees what is
still needed or counts rows that were never fed gets wrong tokens or an assertion.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.batch import Batch, ModelRunner, StepOutput
from models.resident import NO_ROUTE, OWN_TOKEN, DeviceRoute, RoutedRows, SlotSetup, StepRecord, StepRows
from models.sampler import Edits, SamplingRows, sample

MOST_SLOTS = 256
STALE_TOKEN = 10**6
"""Token of a dead row in a record: nobody may look at it."""


@dataclass
class Slot:
    """What the device remembers of a slot."""

    setup: SlotSetup | None = None
    active: bool = False
    token: int = STALE_TOKEN
    position: int = 0
    fresh: bool = True
    """The first token since `setup` has not been drawn."""


class FakeResident:
    """`Resident` over any runner."""

    inline = True

    def __init__(
        self,
        runner: ModelRunner,
        depth: int = 2,
        *,
        dice: random.Random | None = None,
        patience: int = 0,
        eager: bool = False,
        max_stop_ids: int = 8,
        seconds: float = 1e-4,
        refuse: Callable[[DeviceRoute], bool] = lambda _: False,
    ) -> None:
        """
        Args:
            runner: what computes.
            depth: steps in flight.
            dice: chance, for `patience`.
            patience: a step ends after at most so many polls in vain.
            eager: steps run when they are launched, and raise there; their records may come late all the same.
            max_stop_ids: as of a real device.
            seconds: what a step says it took.
            refuse: routes that this device does not take.
        """
        self.runner = runner
        self.depth = depth
        self.max_stop_ids = max_stop_ids
        self.vocab_size, self.hidden_size = runner.vocab_size, runner.hidden_size
        self.context_length, self.page_size = runner.context_length, runner.page_size
        self.num_pages, self.embedding = runner.num_pages, runner.embedding
        self.launched: list[StepRows] = []
        """Every step, in order."""
        self.setups: list[SlotSetup] = []
        self.skipped = 0
        """Most rows of a step that ends early when they are all dead."""
        self.dead_rows = 0
        self.most_in_flight = 0
        self._dice = dice or random.Random(0)
        self._patience = patience
        self._eager = eager
        self._seconds = seconds
        self._refuse = refuse
        self._stream: deque[Callable[[], StepRecord | None]] = deque()
        self._records: deque[StepRecord] = deque()
        self._unpolled = 0
        self._wait = 0
        self._routes: list[DeviceRoute] = []
        self._table = np.zeros((MOST_SLOTS, -(-runner.context_length // runner.page_size)), np.int32)
        self._slots = [Slot() for _ in range(MOST_SLOTS)]

    # What the host asks for

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        self._routes = list(routes)
        return tuple(not self._refuse(route) for route in routes)

    def setup(self, setup: SlotSetup) -> None:
        assert len(setup.stop_ids) <= self.max_stop_ids
        if setup.route != NO_ROUTE:
            assert len(setup.params) == len(self._routes[setup.route].params)
        self.setups.append(setup)
        self._stream.append(lambda: self._take_setup(setup))

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        pages = list(pages)
        self._stream.append(lambda: self._take_pages(slot, first, pages))

    def quick(self, rows: StepRows) -> bool:
        return len(rows) <= 16

    def skips(self, rows: int) -> bool:
        return rows <= self.skipped

    def launch(self, rows: StepRows) -> int:
        assert self._unpolled < self.depth, f"{self._unpolled} steps are in flight already"
        own = rows.tokens == OWN_TOKEN
        assert len(set(rows.slots[own].tolist())) == own.sum(), "two own tokens of one slot"
        assert not set(rows.slots[own].tolist()) & set(rows.slots[~own].tolist()), "own token beside given ones"
        number = len(self.launched) + 1
        copy = StepRows(*(getattr(rows, name).copy() for name in ("slots", "tokens", "positions", "logit_rows")))
        self._stream.append(lambda: self._run(number, copy))
        if self._eager:
            self._run_one_step()
        self.launched.append(rows)
        self._unpolled += 1
        self.most_in_flight = max(self.most_in_flight, self._unpolled)
        return number

    def poll(self) -> StepRecord | None:
        if not self._unpolled:
            return None
        if self._wait:
            self._wait -= 1
            return None
        if not self._records:
            for _ in range(self._dice.randint(1, self._unpolled)):
                self._run_one_step()
        if self._dice.random() < 0.5:
            self._wait = self._dice.randint(0, self._patience)
        self._unpolled -= 1
        return self._records.popleft()

    @property
    def in_flight(self) -> int:
        return self._unpolled

    def step(self, batch: Batch) -> StepOutput:
        assert not self._unpolled, "a step of the host's beside others"
        while self._stream:
            self._stream.popleft()()
        # Through the device's own table: it has to be the host's.
        return self.runner.step(replace(batch, page_table=self._table))

    # What the device does

    def _run_one_step(self) -> None:
        while (record := self._stream.popleft()()) is None:
            pass
        self._records.append(record)

    def _take_setup(self, setup: SlotSetup) -> None:
        slot = self._slots[setup.slot]
        slot.setup, slot.fresh = setup, True

    def _take_pages(self, slot: int, first: int, pages: list[int]) -> None:
        self._table[slot, first : first + len(pages)] = pages

    def _run(self, number: int, rows: StepRows) -> StepRecord:
        tokens, positions = rows.tokens.copy(), rows.positions.copy()
        alive = np.ones(len(rows), bool)
        for row in np.flatnonzero(rows.tokens == OWN_TOKEN):
            slot = self._slots[rows.slots[row]]
            alive[row] = slot.active
            tokens[row], positions[row] = slot.token, slot.position
        fed = np.flatnonzero(alive)
        wanted = np.flatnonzero(alive[rows.logit_rows])
        where = rows.logit_rows[wanted]
        slots = [self._slots[slot] for slot in rows.slots[where]]
        count = len(rows.logit_rows)
        self.dead_rows += count - len(wanted)
        record = StepRecord(
            step=number,
            alive=alive[rows.logit_rows],
            tokens=np.full(count, STALE_TOKEN, np.int32),
            destinations=np.full(count, 99, np.int32),
            stays=np.ones(count, bool),
            seconds=self._seconds,
        )
        for slot in {int(s) for s in rows.slots[~alive]}:
            assert not self._slots[slot].active
        if not len(fed):
            if len(rows) <= self.skipped:
                record.seconds = 0.0
            return record
        index = np.array(
            [position + 1 - slot.setup.prompt_length for slot, position in zip(slots, positions[where], strict=True)],
            np.int64,
        )
        place = np.full(len(rows), -1)
        place[fed] = np.arange(len(fed))
        batch = Batch(tokens[fed], positions[fed], rows.slots[fed], self._table, place[where], index)
        with torch.inference_mode():
            output = self.runner.step(batch)
            if len(wanted):
                drawn = sample(output.logits, _sampling(slots, index))
                destinations = self._destinations(output, drawn, slots, index)
                self._advance(record, wanted, slots, drawn.tolist(), destinations, positions[where].tolist(), index)
        return record

    def _destinations(self, output: StepOutput, drawn: torch.Tensor, slots: list[Slot], index: np.ndarray) -> list[int]:
        """Every algorithm sees all rows; each row takes its own one's answer."""
        answers = [0] * len(slots)
        setups = [slot.setup for slot in slots]
        for number, route in enumerate(self._routes):
            members = [row for row, setup in enumerate(setups) if setup.route == number]
            if not members:
                continue
            columns = [
                [setup.params[column] if setup.route == number else 1.0 for setup in setups]
                for column in range(len(route.params))
            ]
            rows = RoutedRows(
                logits=output.logits,
                hidden=output.hidden,
                tokens=drawn,
                index=torch.from_numpy(index),
                seed=torch.tensor([_signed(setup.seed) for setup in setups], dtype=torch.int64),
                choice=torch.tensor([setup.choice for setup in setups], dtype=torch.int64),
                params={
                    name: torch.tensor(column, dtype=torch.float32)
                    for name, column in zip(route.params, columns, strict=True)
                },
            )
            given = route.decide(rows).tolist()
            assert len(given) == len(slots)
            for row in members:
                if setups[row].routable or not slots[row].fresh:
                    answers[row] = given[row]
        return answers

    def _advance(
        self,
        record: StepRecord,
        wanted: np.ndarray,
        slots: list[Slot],
        drawn: list[int],
        destinations: list[int],
        positions: list[int],
        index: np.ndarray,
    ) -> None:
        for row, slot, token, destination, position, output in zip(
            wanted, slots, drawn, destinations, positions, index, strict=True
        ):
            setup = slot.setup
            over = token in setup.stop_ids or output + 1 >= setup.max_tokens
            assert output < setup.max_tokens, "a row behind the last token"
            slot.active = destination == 0 and not over
            slot.token, slot.position, slot.fresh = token, position + 1, False
            record.tokens[row], record.destinations[row], record.stays[row] = token, destination, slot.active


def _sampling(slots: list[Slot], index: np.ndarray) -> SamplingRows:
    setups = [slot.setup for slot in slots]
    banned = [
        (row, token) for row, setup in enumerate(setups) if index[row] < setup.min_tokens for token in setup.stop_ids
    ]
    rows, ids = (np.array(column, np.int64) for column in zip(*banned, strict=True)) if banned else ([], [])
    return SamplingRows(
        temperature=np.array([setup.temperature for setup in setups], np.float32),
        top_k=np.array([setup.top_k for setup in setups]),
        top_p=np.array([setup.top_p for setup in setups], np.float32),
        min_p=np.array([setup.min_p for setup in setups], np.float32),
        seed=np.array([setup.seed for setup in setups], np.uint64),
        choice=np.array([setup.choice for setup in setups]),
        output_index=index,
        bias=Edits(rows, ids, np.full(len(rows), -np.inf, np.float32)) if banned else None,
    )


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed
