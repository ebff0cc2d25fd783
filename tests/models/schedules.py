"""Random schedules for a device-resident runner, checked row by row against a plain loop over the same model.

`Schedule` plays the worker: requests are admitted, prefilled in pieces, decoded, handed off, taken back with other ids,
changed live and aborted, while up to `depth` steps are in flight and records may be read late. `expected` is what a loop
without any of that decides for one row.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from models.batch import StepOutput
from models.device_runner import DeviceRunner
from models.kv_cache import KvCache
from models.resident import NO_ROUTE, OWN_TOKEN, DeviceRoute, RoutedRows, SlotSetup, StepRecord, StepRows
from models.rng import Purpose, uniform_tensor
from models.sampler import Edits, SamplingRows, sample

Model = Callable[[list[int]], StepOutput]
"""Ids fed -> what the last of them gives: one row."""


def bernoulli(rows: RoutedRows) -> torch.Tensor:
    """1 with probability p."""
    return (uniform_tensor(rows.seed, rows.choice, rows.index, Purpose.ROUTE) < rows.params["p"]).long()


def peaked(rows: RoutedRows) -> torch.Tensor:
    """1 or 2 where few logits reach the largest, by a parameter and the hidden state."""
    top = (rows.logits >= rows.logits.amax(dim=-1, keepdim=True)).sum(dim=-1)
    return torch.where(top <= rows.params["most"], 1 + (rows.hidden[:, 0].long() & 1), 0)


def every_n(rows: RoutedRows) -> torch.Tensor:
    """1 at the last of every n positions; divides by its parameter."""
    return ((rows.index + 1) % rows.params["n"].long() == 0).long() * (1 + rows.tokens % 2)


ROUTES = (
    DeviceRoute("bernoulli", bernoulli, ("p",)),
    DeviceRoute("peaked", peaked, ("ignored", "most")),
    DeviceRoute("every", every_n, ("n",)),
)


@dataclass
class Request:
    """One request on this worker; the host's view and, in `ids`, the truth."""

    setup: SlotSetup
    ids: list[int]
    """Prompt and committed output, as of the last step launched and checked."""
    fed: int = 0
    """Ids launched."""
    decoding: bool = False
    """The host believes that the slot goes on by itself."""
    closed: bool = False
    """Aborted or ended: the slot is given back once nothing in flight touches it."""
    last_step: int = 0
    pages: int = 0
    """Pages that the runner has been told of."""
    active: bool = False
    """Truth: the slot's own token is fed if a row asks for it."""
    routable: bool = True


@dataclass
class Launched:
    """What a step's record is checked against."""

    rows: list[tuple[Request, int]]
    """Request and token (or OWN_TOKEN) of each logit row."""
    expected: list[tuple[bool, int, int, bool]]


def expected(model: Model, request: Request, routes: Sequence[DeviceRoute]) -> tuple[int, int, bool]:
    """Token, destination and whether the slot stays, after all of the request's ids were fed."""
    setup = request.setup
    index = len(request.ids) - setup.prompt_length
    output = model(request.ids)
    output = StepOutput(output.logits.cpu(), output.hidden.cpu())
    sampling = SamplingRows(
        temperature=np.array([setup.temperature], np.float32),
        top_k=np.array([setup.top_k]),
        top_p=np.array([setup.top_p], np.float32),
        min_p=np.array([setup.min_p], np.float32),
        seed=np.array([setup.seed], np.uint64),
        choice=np.array([setup.choice]),
        output_index=np.array([index]),
    )
    if index < setup.min_tokens and setup.stop_ids:
        count = len(setup.stop_ids)
        sampling.bias = Edits(np.zeros(count, np.int64), np.array(setup.stop_ids), np.full(count, -np.inf, np.float32))
    token = sample(output.logits, sampling)
    destination = 0
    if setup.route != NO_ROUTE and request.routable:
        route = routes[setup.route]
        rows = RoutedRows(
            logits=output.logits,
            hidden=output.hidden,
            tokens=token,
            index=torch.tensor([index]),
            seed=torch.from_numpy(np.array([setup.seed], np.uint64).view(np.int64)),
            choice=torch.tensor([setup.choice]),
            params={name: torch.tensor([value]) for name, value in zip(route.params, setup.params, strict=True)},
        )
        destination = int(route.decide(rows))
    stays = destination == 0 and int(token) not in setup.stop_ids and index + 1 < setup.max_tokens
    return int(token), destination, stays


@dataclass
class Schedule:
    """Plays the worker with random choices."""

    runner: DeviceRunner
    model: Model
    kv: KvCache
    chance: random.Random
    routes: Sequence[DeviceRoute] = ROUTES
    depth: int = 2
    vocab: int = 97
    largest_prompt: int = 9
    most_rows: int = 24
    late: float = 0.5
    """Chance that a record that is there is left for later."""
    requests: dict[int, Request] = field(default_factory=dict)
    launched: deque[Launched] = field(default_factory=deque)
    record: Callable[[StepRecord], None] = lambda _: None
    steps: int = 0
    checked: int = 0
    """Logit rows compared."""
    dead: int = 0
    """Rows among them that were inactive."""
    answers: list[list[int]] = field(default_factory=list)
    """Ids of every request that ended."""

    def run(self, steps: int) -> None:
        """Launch that many steps, then read what is in flight."""
        while self.steps < steps:
            self.tick()
        while self.runner.in_flight:
            self.read()

    def tick(self) -> None:
        """Some admissions, returns, changes and aborts; then a launch if there is room for it."""
        for _ in range(self.chance.choice((0, 0, 1, 3))):
            self.chance.choice((self.admit, self.admit, self.come_back, self.change, self.abort))()
        if self.runner.in_flight < self.depth:
            self.launch()
        if self.runner.in_flight == self.depth or self.chance.random() > self.late:
            self.read()

    def admit(self) -> None:
        slot = self.kv.open()
        if slot is None:
            return
        chance = self.chance
        prompt = [chance.randrange(self.vocab) for _ in range(chance.randint(1, self.largest_prompt))]
        setup = self._parameters(slot, len(prompt))
        self.runner.setup(setup)
        self.requests[slot] = Request(setup, prompt, routable=setup.routable)

    def _parameters(self, slot: int, prompt_length: int) -> SlotSetup:
        chance = self.chance
        route = chance.randrange(-1, len(self.routes))
        params = (chance.random() / 2, 3.0, float(chance.randint(1, 6)))
        return SlotSetup(
            slot=slot,
            prompt_length=prompt_length,
            max_tokens=chance.choice((1, 3, 8, 20, 1 << 40)),
            min_tokens=chance.choice((0, 0, 2, 5)),
            stop_ids=tuple(chance.sample(range(self.vocab), chance.choice((0, 1, 3, 24)))),
            temperature=chance.choice((0.0, 0.0, 0.3, 1.0, 2.5)),
            top_k=chance.choice((0, 0, 1, 5, 40)),
            top_p=chance.choice((1.0, 1.0, 0.9, 0.4)),
            min_p=chance.choice((0.0, 0.0, 0.05, 0.5)),
            seed=chance.getrandbits(64),
            choice=chance.randrange(3),
            route=route,
            routable=chance.random() < 0.7,
            params={NO_ROUTE: (), 0: params[:1], 1: (9.0, params[1]), 2: params[2:]}[route],
        )

    def come_back(self) -> None:
        """A request that is away returns with ids that others wrote."""
        away = [r for r in self.requests.values() if self._away(r)]
        if not away:
            return
        request = self.chance.choice(away)
        kept = self.kv.truncate(request.setup.slot, min(request.fed, len(request.ids)))
        request.fed = kept
        request.pages = min(request.pages, -(-kept // self.kv.page_size))
        request.ids += [self.chance.randrange(self.vocab) for _ in range(self.chance.randint(1, 4))]
        request.routable = self.chance.random() < 0.7
        request.setup = replace(request.setup, routable=request.routable)
        self.runner.setup(request.setup)

    def _away(self, request: Request) -> bool:
        quiet = not any(request is r for step in self.launched for r, _ in step.rows)
        return quiet and not request.closed and not request.decoding and request.fed >= len(request.ids)

    def change(self) -> None:
        """Parameters change while the slot decodes; holds from the next launched step on."""
        live = [r for r in self.requests.values() if r.decoding]
        if not live:
            return
        request = self.chance.choice(live)
        fresh = self._parameters(request.setup.slot, request.setup.prompt_length)
        request.setup = replace(fresh, routable=True)
        request.routable = True
        self.runner.setup(request.setup)

    def abort(self) -> None:
        if self.requests:
            request = self.chance.choice(list(self.requests.values()))
            request.closed = True
            request.decoding = False
            self._give_back()

    def _give_back(self) -> None:
        pending = self.steps - len(self.launched)
        for slot, request in list(self.requests.items()):
            if request.closed and request.last_step <= pending:
                self.answers.append(request.ids)
                self.kv.close(slot)
                del self.requests[slot]

    def launch(self) -> None:
        chance = self.chance
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        step = Launched([], [])
        order = [r for r in self.requests.values() if not r.closed]
        chance.shuffle(order)
        for request in order:
            slot, first = request.setup.slot, request.fed
            room = self.most_rows - len(tokens)
            if request.decoding:
                count, wanted, fed = 1, True, [OWN_TOKEN]
            else:
                unfed = len(request.ids) - first
                count = min(chance.randint(1, 6), unfed, room)
                wanted, fed = count == unfed, request.ids[first : first + count]
            if room < 1 or count < 1 or chance.random() < 0.2 or not self._reserve(request, first + count):
                continue
            tokens += fed
            positions += [0] * count if request.decoding else range(first, first + count)
            slots += [slot] * count
            request.fed += count
            request.last_step = self.steps + 1
            if wanted:
                logit_rows.append(len(tokens) - 1)
                step.rows.append((request, fed[-1]))
                step.expected.append(self._expect(request, fed[-1]))
                request.decoding = True
        if not tokens:
            return
        rows = StepRows(*(np.array(part, np.int64) for part in (slots, tokens, positions, logit_rows)))
        self.steps += 1
        assert self.runner.launch(rows) == self.steps
        self.launched.append(step)

    def _reserve(self, request: Request, length: int) -> bool:
        slot = request.setup.slot
        if length > self.kv.max_context or not self.kv.reserve(slot, length):
            return False
        count = -(-length // self.kv.page_size)
        first = request.pages if self.chance.random() < 0.9 else 0
        if first < count:
            self.runner.set_pages(slot, first, self.kv.page_table[slot, first:count].tolist())
        request.pages = max(request.pages, count)
        return True

    def _expect(self, request: Request, fed: int) -> tuple[bool, int, int, bool]:
        """What the step that is being launched decides for the request; moves the truth along."""
        if fed == OWN_TOKEN and not request.active:
            return False, 0, 0, False
        token, destination, stays = expected(self.model, request, self.routes)
        request.active = stays
        request.routable = request.routable or stays
        if stays:
            request.ids.append(token)
        return True, token, destination, stays

    def read(self) -> None:
        """Take one record if there is one, and believe it."""
        record = self.runner.poll()
        if record is None:
            return
        step = self.launched.popleft()
        assert record.step == self.steps - len(self.launched)
        found = zip(
            record.alive.tolist(),
            record.tokens.tolist(),
            record.destinations.tolist(),
            record.stays.tolist(),
            strict=True,
        )
        for (request, _), row, wanted in zip(step.rows, found, step.expected, strict=True):
            self.checked += 1
            if not wanted[0]:
                self.dead += 1
                assert not row[0]
                assert not row[3]
                continue
            assert row == wanted, f"step {record.step}, slot {request.setup.slot}: {row}, expected {wanted}"
            if not row[3]:
                request.decoding = False
                request.closed = request.closed or row[2] == 0
        self.record(record)
        self._give_back()
