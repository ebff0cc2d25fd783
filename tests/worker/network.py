"""Rings, processes and a supervisor in a bad mood: what a host can do to workers, in any order that real rings allow.

Messages of one ring stay in order; everything else is chance: which ring is read next, whether a ring is full, who dies, with
how much of what it had sent, who is stopped for a while, when the supervisor's word on it arrives, and which client goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ipc.messages import Active, Message, Nack, PeerReq, Submit, Warm
from models.batch import ModelRunner
from tests.harness import Answer, Cluster
from trouterd.worker.events import ProcessState
from trouterd.worker.outbound import API

LISTS = ((), (1, 2), (1, 1, 2, 4), (1, 2, 3, 4, 5, 6))
"""Thresholds, some of which can have all models wait at once: for the linger time."""


@dataclass(frozen=True)
class Mood:
    """Probabilities, per delivery unless said otherwise."""

    full: float = 0.0
    """A ring refuses a message."""
    repeat: float = 0.0
    """A hand-off or its refusal arrives twice."""
    death: float = 0.0
    stall: float = 0.0
    api_death: float = 0.0
    abort: float = 0.0
    tune: float = 0.0
    """A worker gets other lists of delayed batching."""
    lag: int = 2
    """Most turns of the event loop between two deliveries."""


@dataclass
class Job:
    """A request as the test knows it."""

    route: str
    prompt: list[int]
    sampling: dict[str, float]
    rid: int = 0
    answer: Answer = field(default_factory=Answer)
    lost: bool = False
    """Its client, its entry or the api went away."""


class Network:
    """Between the workers of a cluster until `calm`; then it delivers whatever there is."""

    def __init__(self, cluster: Cluster, mood: Mood, dice: random.Random, runner: Callable[[str], ModelRunner]) -> None:
        self.cluster = cluster
        self.mood = mood
        self.dice = dice
        self.runner = runner
        self.jobs: list[Job] = []
        self.rings: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.control: dict[int, deque[ProcessState]] = defaultdict(deque)
        self.states = dict.fromkeys(range(len(cluster.names)), "up")
        self.frozen: set[int] = set()
        self.events: list[str] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}
        cluster.hold = self._hold
        cluster.accept = self._accept

    def _accept(self, source: int, target: int, message: Message) -> bool:
        return self.dice.random() >= self.mood.full

    def _hold(self, source: int, target: int, message: Message) -> bool:
        if target == API:
            return False
        self.rings[source, target].append(message)
        return True

    # Life

    def start(self) -> None:
        for index in range(len(self.cluster.names)):
            self._run(index)

    def _run(self, index: int) -> None:
        self.tasks[index] = asyncio.create_task(self.cluster.workers[self.cluster.names[index]].run())

    async def stop(self) -> None:
        for worker in self.cluster.workers.values():
            worker.stop()
        await asyncio.gather(*self.tasks.values())

    def submit(self, job: Job) -> None:
        """Through the api's ring; lost at once while the entry is not there."""
        entry = self.entry(job)
        self.jobs.append(job)
        if self.states[entry] == "down":
            job.lost = True
            return
        if any(state.index == API for state in self.control[entry]):
            # A new api starts long after everybody has heard of the old one's death.
            self._hear(entry, len(self.control[entry]))
        with self._client():
            job.rid, job.answer = self.cluster.submit(job.route, job.prompt, **job.sampling)

    @contextlib.contextmanager
    def _client(self) -> Iterator[None]:
        """What the client's side sends inside goes through the api's ring."""
        through = Cluster.deliver
        self.cluster.deliver = lambda target, message: self.rings[API, target].append(message)  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.cluster.deliver = through.__get__(self.cluster)  # type: ignore[method-assign]

    def entry(self, job: Job) -> int:
        return self.cluster.names.index(self.cluster.config.all_routes()[job.route].models[0])

    def _lose(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.answer.finish:
                job.lost = True
                self.cluster.answers.pop(job.rid, None)

    # Trouble

    async def _trouble(self) -> None:
        dice, mood = self.dice, self.mood
        if dice.random() < mood.abort and (running := [j for j in self.jobs if not j.lost and not j.answer.finish]):
            job = dice.choice(running)
            self._lose([job])
            with self._client():
                self.cluster.abort(job.rid, job.route)
        if dice.random() < mood.stall:
            self._stall(dice.choice(list(self.states)))
        if dice.random() < mood.death:
            index = dice.choice(list(self.states))
            await (self._revive(index) if self.states[index] == "down" else self._kill(index))
        if mood.tune and dice.random() < mood.tune:
            worker = self.cluster.workers[dice.choice(self.cluster.names)]
            worker.launching.configure(dice.choice(LISTS), 0.002, relax=dice.random() < 0.3)
        if dice.random() < mood.api_death:
            self._lose(self.jobs)
            for index in self.states:
                self.control[index] += [ProcessState(API, "down"), ProcessState(API, "up")]

    def _tell(self, subject: int, state: str) -> None:
        self.states[subject] = state
        self.events.append(f"{subject} {state}")
        for index in self.states:
            if index != subject and self.states[index] != "down":
                self.control[index].append(ProcessState(subject, state))

    def _stall(self, index: int) -> None:
        if self.states[index] == "up":
            self._tell(index, "stalled")
            if self.dice.random() < 0.7:
                self.frozen.add(index)
        elif self.states[index] == "stalled":
            self.frozen.discard(index)
            self._tell(index, "up")

    async def _kill(self, index: int) -> None:
        """What it had not put on its rings yet is lost with it."""
        worker = self.cluster.workers[self.cluster.names[index]]
        worker.outbound.connect(lambda *_: True)
        worker.stop()
        await self.tasks[index]
        self.frozen.discard(index)
        self.control[index].clear()
        for (source, _), ring in self.rings.items():
            if source == index and self.dice.random() < 0.5:
                for _ in range(self.dice.randint(0, len(ring))):
                    ring.pop()
        self._lose([job for job in self.jobs if self.entry(job) == index])
        self._tell(index, "down")

    async def _revive(self, index: int) -> None:
        """All others have heard of the death before the new process is there, and that it is there before it sends."""
        name = self.cluster.names[index]
        worker = self.cluster.open_worker(name, self.runner(name))
        for (_, target), ring in self.rings.items():
            if target == index:
                for message in ring:
                    if not isinstance(message, Submit | Warm | Active):
                        worker.deliver(message)
                ring.clear()
        for other, state in self.states.items():
            if other != index:
                worker.deliver(ProcessState(other, state))
        self._tell(index, "up")
        for other in self.states:
            self._hear(other, len(self.control[other]))
        self._run(index)

    # Delivery

    def _hear(self, index: int, count: int) -> None:
        for _ in range(count):
            news = self.control[index].popleft()
            if news.state == "down" and news.index != API:
                # As a worker process does: what the dead one sent comes before the news of its death.
                while self.rings[news.index, index]:
                    self._read((news.index, index))
            self.cluster.workers[self.cluster.names[index]].deliver(news)

    def _read(self, ring: tuple[int, int]) -> None:
        message = self.rings[ring].popleft()
        self.cluster.deliver(ring[1], message)
        if isinstance(message, PeerReq | Nack) and self.dice.random() < self.mood.repeat:
            self.cluster.deliver(ring[1], message)

    def _turn(self) -> None:
        self.cluster.held.clear()
        up = [index for index, state in self.states.items() if state != "down" and index not in self.frozen]
        rings = [r for r, queue in self.rings.items() if queue and r[1] in up and r[0] not in self.frozen]
        heard = [index for index in up if self.control[index]]
        for ring in self.dice.sample(rings, self.dice.randint(0, len(rings))):
            for _ in range(self.dice.randint(1, len(self.rings[ring]))):
                self._read(ring)
        if heard and self.dice.random() < 0.5:
            self._hear(self.dice.choice(heard), 1)

    async def storm(self, jobs: list[Job], turns: int) -> None:
        """Submit all jobs within so many turns, in the mood that this network is in."""
        due = deque(jobs)
        for turn in range(turns):
            while due and len(jobs) - len(due) <= turn * len(jobs) // turns:
                self.submit(due.popleft())
            self._turn()
            await self._trouble()
            for _ in range(self.dice.randint(1, self.mood.lag)):
                await asyncio.sleep(0)

    async def calm(self) -> None:
        """Everybody is up again and every message arrives; returns when nothing is left to do anywhere."""
        self.mood = Mood()
        for index, state in self.states.items():
            if state == "down":
                await self._revive(index)
            elif state == "stalled":
                self._stall(index)
        for index in self.states:
            self._hear(index, len(self.control[index]))
        while not self._over():
            self._turn()
            await asyncio.sleep(0)
            for task in self.tasks.values():
                if task.done():
                    task.result()

    def _over(self) -> bool:
        return (
            all(job.lost or job.answer.finish for job in self.jobs)
            and not any(self.rings.values())
            and all(w.idle.is_set() and not w._inbox and not w.active.untold for w in self.cluster.workers.values())
            and not any(w.outbound.unsent or w.stream for w in self.cluster.workers.values())
        )
