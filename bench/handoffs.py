"""What a hand-off costs the host on its way between two workers: microseconds of CPU per request, by phase.

    python -m bench.handoffs [--requests 16,64] [--run 3] [--cycles 300] [--profile]

Two workers in one process and one event loop, over real rings and the device runner that a GPU uses, less the device: entries are
written and records read, and steps take no time. The entry writes `--run` tokens of each request, then all go to the large model
together, which writes one token and hands them back; lists of delayed batching keep them together.

- commit + send: from the record of a step that all requests leave, until the last hand-off is published in the ring.
- receive: from the first hand-off read until the step that serves them is planned.
- plan: the scheduler's.
- launch: from there until the entry of the step is written, for a GPU would start then.
- stay: from the record of a step that all requests stay in until the next step is written (the entry only).
- cycle: all CPU of both workers between two such hand-offs, what they do while steps run included.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import os
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import uvloop

from bench.command_line import run_command
from bench.host_steps import HostSteps, NoRows
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.messages import Message, PeerReq, Sampling, Submit, pack_ids
from ipc.segment import SharedSegment
from models.device_runner import DeviceRunner
from models.kv_cache import KvCache
from trouterd.config import Config, Model, Rings, Route
from trouterd.control import Link
from trouterd.links import Links
from trouterd.worker.outbound import API
from trouterd.worker.route import ModelFacts, build_routes
from trouterd.worker.worker import Worker

PROMPT = 100
PAGE_SIZE = 16
VOCAB = 151_936
NAMES = ("small", "large")
PHASES = ("commit + send", "receive", "plan", "launch", "stay", "cycle")
LINGERS = (0.2, 600.0)
"""Seconds, per side. Requests whose prompts were fed earlier go on to the large model, which waits there for the others; two sides
that both went on would pass them by each other for ever."""
WARM_UP = 30
"""Cycles that do not count."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is handed to and fro."""

    requests: int
    run: int
    """Tokens that the entry writes between two hand-offs."""
    cycles: int

    @property
    def context(self) -> int:
        """Tokens of one request, with room for what is not counted."""
        return PROMPT + (self.cycles + 2 * WARM_UP) * (self.run + 1)


class Side:
    """One worker with its marks of time."""

    def __init__(self, index: int, config: Config, load: Load) -> None:
        self.load = load
        self.spans: dict[str, list[float]] = defaultdict(list)
        """CPU seconds by phase, of all requests together."""
        self._seen = self._read = self._planned = self._handed = 0.0
        self._sent = self._wanted = 0
        self._gathering = False
        self._done = asyncio.Event()
        name, run = NAMES[index], 1 if index else load.run
        pages = 2 * load.requests * -(-load.context // PAGE_SIZE)
        runner = DeviceRunner(
            NoRows(pages, PAGE_SIZE, load.context, VOCAB),
            max_slots=load.requests,
            max_pages=-(-load.context // PAGE_SIZE),
            steps=lambda slots: HostSteps(slots, run, self._on_launch, self._on_record),
        )
        facts = ModelFacts(VOCAB, runner.hidden_size, torch.device("cpu"))
        routes = build_routes(config, name, facts, dict.fromkeys(NAMES, frozenset({0})))
        kv = KvCache(pages, PAGE_SIZE, load.requests, load.context, prefix_cache=True)
        self.worker = Worker(index, routes, runner, kv, 2048)
        self.worker.launching.configure((load.requests,) * load.requests, LINGERS[index], relax=False)
        self._plan = self.worker.scheduler.plan
        self.worker.scheduler.plan = self._timed_plan  # type: ignore[method-assign]

    def connect(self, inbound: list[Link], outbound: list[Link]) -> Links:
        """Attach to rings as a worker's process does."""
        links = Links(
            asyncio.get_running_loop(), inbound, outbound, Rings(), lambda _, m: self._receive(m), lambda *_: None
        )

        def send(target: int, message: Message) -> bool:
            done = links.send("api" if target == API else NAMES[target], message)
            if isinstance(message, PeerReq):
                self._sent += 1
                if not self._gathering:
                    self._handed_over()
            return done

        self.worker.outbound.connect(send, partial(self._together, links))
        return links

    async def handed_back(self, cycles: int) -> None:
        """Wait until all requests have been handed over so often since the spans were empty."""
        self._done.clear()
        self._wanted = cycles
        await self._done.wait()

    def _note(self, phase: str, since: float) -> None:
        self.spans[phase].append(time.thread_time() - since)

    def _on_record(self) -> None:
        self._seen = time.thread_time()

    @contextmanager
    def _together(self, links: Links, most: int) -> Iterator[None]:
        self._gathering = True
        with links.together(most):
            yield
        self._gathering = False
        self._handed_over()

    def _handed_over(self) -> None:
        """What has been sent is in the ring."""
        sent, self._sent = self._sent, 0
        if sent == self.load.requests:
            self._note("commit + send", self._seen)
            self._note("cycle", self._handed)
            self._handed = time.thread_time()
            self._seen = 0.0
            if len(self.spans["cycle"]) == self._wanted:
                self._done.set()

    def _receive(self, message: Message) -> None:
        if not self._read and isinstance(message, PeerReq):
            self._read = time.thread_time()
        self.worker.deliver(message)

    def _timed_plan(self) -> list[Any]:
        begin = time.thread_time()
        if self._read:
            self._note("receive", self._read)
        chunks = self._plan()
        self._planned = time.thread_time()
        if self._read and len(chunks) == self.load.requests:
            self.spans["plan"].append(self._planned - begin)
        return chunks

    def _on_launch(self) -> None:
        if self._read:
            self._note("launch", self._planned)
        elif self._seen:
            self._note("stay", self._seen)
        self._read = 0.0


@contextmanager
def rings() -> Iterator[dict[tuple[str, str], Link]]:
    """A ring per ordered pair of processes: the link of either end, by source and destination."""
    pairs = [("small", "large"), ("large", "small"), ("small", "api"), ("large", "api")]
    segments, ends = [], {}
    for number, (source, destination) in enumerate(pairs):
        segment = SharedSegment.create(RingSpec(ring_id=number, capacity=1 << 27 if destination == "api" else 1 << 20))
        segments.append(segment)
        ends[source, destination] = Link(destination, segment.fileno(), create_event(), create_event())
    try:
        yield ends
    finally:
        for segment in segments:
            segment.close()


async def hand_to_and_fro(load: Load, profile: cProfile.Profile | None) -> list[Side]:
    """Both sides, with what they have measured."""
    route = Route(models=list(NAMES), algorithm="bernoulli", params={"p": 0.5})
    config = Config(models={name: Model(path=name) for name in NAMES}, routes={"pair": route})
    sides = [Side(index, config, load) for index in range(2)]
    with rings() as ends:
        links = []
        for index, side in enumerate(sides):
            me, other = NAMES[index], NAMES[1 - index]
            back = ends[other, me]
            inbound = Link(other, back.ring_fd, back.data_event_fd, back.space_event_fd)
            links.append(side.connect([inbound], [ends[me, other], ends[me, "api"]]))
        for link in links:
            link.start()
        loops = [asyncio.create_task(side.worker.run()) for side in sides]
        for rid in range(load.requests):
            sampling = Sampling(seed=rid, max_tokens=load.context - PROMPT, temperature=1.0)
            sides[0].worker.deliver(Submit(rid, "pair", pack_ids([rid + 7] * PROMPT), sampling))
        await sides[1].handed_back(WARM_UP)
        for side in sides:
            side.spans.clear()
        gc.collect()
        if profile is not None:
            profile.enable()
        await sides[1].handed_back(load.cycles)
        if profile is not None:
            profile.disable()
        for side, loop in zip(sides, loops, strict=True):
            side.worker.stop()
            await loop
        for link in links:
            await link.aclose()
    return sides


def medians(sides: list[Side]) -> list[dict[str, float]]:
    """CPU seconds by side and phase."""
    return [{phase: statistics.median(spans) for phase, spans in side.spans.items()} for side in sides]


def report(load: Load, runs: list[list[dict[str, float]]]) -> str:
    """A table of the least of the runs' medians, microseconds per request."""
    title = f"{load.requests} requests, {load.run} tokens a visit: us per request"
    lines = [title + "".join(f"{phase:>15}" for phase in PHASES)]
    for index, name in enumerate(NAMES):
        cells = [_cell([run[index][phase] for run in runs if phase in run[index]], load.requests) for phase in PHASES]
        lines.append(f"{name:>{len(title)}}" + "".join(cells))
    return "\n".join(lines)


def _cell(seconds: list[float], requests: int) -> str:
    return f"{min(seconds) / requests * 1e6:15.2f}" if seconds else f"{'-':>15}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="bench.handoffs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", default="16,64", metavar="LIST", help="that are handed over together (%(default)s)"
    )
    parser.add_argument(
        "--run", type=int, default=3, metavar="N", help="tokens that the entry writes between (%(default)s)"
    )
    parser.add_argument(
        "--cycles", type=int, default=300, metavar="N", help="hand-overs of all of them that are measured (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs, of which each phase's least median counts (%(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="under cProfile, by own time")
    options = parser.parse_args()
    for requests in map(int, options.requests.split(",")):
        load = Load(requests, options.run, options.cycles)
        profile = cProfile.Profile() if options.profile else None
        runs = [medians(uvloop.run(hand_to_and_fro(load, profile))) for _ in range(options.repeats)]
        print(f"{report(load, runs)}   (load {os.getloadavg()[0]:.1f})", flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(60)
    return 0


if __name__ == "__main__":
    run_command("bench.handoffs", main)
